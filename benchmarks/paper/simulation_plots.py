"""Plots of simulation.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.output import BLUE, GREEN, ORANGE, RED, VIOLET, load_pyplot, save
from horovod_oktopk.transport.base import WORD

COLORS = {"OkTopk": ORANGE, "GTopk": BLUE, "TopkDSA": GREEN, "TopkA": RED, "dense": "#777777"}


def plot(outcome: dict[str, Any], path: Path) -> None:
    figure, panels = load_pyplot().subplots(1, 3, figsize=(16, 6), layout="constrained")
    plot_payload(outcome, panels[0])
    plot_control(outcome, panels[1])
    plot_seconds(outcome, panels[2])
    ranks = sorted({r["ranks"] for r in outcome["results"]} | {m["ranks"] for m in outcome["measured"]})
    shown = [size for size in ranks if size & (size - 1) == 0] or ranks
    for axes in panels:
        axes.set(xlabel="ranks", xscale="log", yscale="log")
        axes.set_xticks(shown, shown)
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.suptitle(f"Simulated ranks, n = {outcome['n']:,}, k = {outcome['k']:,}")
    save(figure, path, dpi=110)


def last_steps(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last step of each scheme and number of ranks. OkTopk cuts regions in the first step alone."""
    return list({(r["scheme"], r["ranks"]): r for r in results}.values())


def by_scheme(results: list[dict[str, Any]], key: str, factor: float) -> dict[str, tuple[list[int], list[float]]]:
    """Return the ranks and values of each scheme, in the order of the ranks."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for r in sorted(results, key=lambda r: r["ranks"]):
        sizes, values = found.setdefault(r["scheme"], ([], []))
        sizes.append(r["ranks"])
        values.append(r[key] * factor)
    return found


def plot_payload(outcome: dict[str, Any], axes: Any) -> None:
    k = outcome["k"]
    for scheme, (sizes, values) in by_scheme(last_steps(outcome["results"]), "payload_most", 1 / k).items():
        axes.plot(sizes, values, marker="o", markersize=4, color=COLORS[scheme], label=scheme)
    sizes, words = by_scheme(outcome["dense"], "words", 1 / k)["dense"]
    axes.plot(sizes, words, color=COLORS["dense"], label="dense, 2n(P−1)/P")
    for sizes, bounds in by_scheme([r for r in outcome["results"] if r["bound"]], "bound", 1 / k).values():
        axes.plot(sizes, bounds, "k--", linewidth=1, label="OkTopk's bound")
    axes.set(title="Payload words of the rank that sends most / k")


def plot_control(outcome: dict[str, Any], axes: Any) -> None:
    k = outcome["k"]
    results = [r for r in outcome["results"] if r["scheme"] == "OkTopk"]
    for label, step, key, color in (("payload", 2, "payload_mean", COLORS["OkTopk"]),
                                    ("control, ordinary step", 2, "control_mean", VIOLET),
                                    ("control, regions cut", 1, "control_mean", "#937860")):
        chosen = by_scheme([r for r in results if r["step"] == step], key, 1 / k)
        for sizes, values in chosen.values():
            axes.plot(sizes, values, marker="o", markersize=4, color=color, label=label)
    counted = [m for m in outcome["measured"] if m["scheme"] == "OkTopk" and m.get("bytes_sent") is not None]
    measured = by_scheme(counted, "bytes_sent", 1 / WORD / k)
    for sizes, values in measured.values():
        axes.plot(sizes, values, "k*", markersize=11, label="measured on a cluster, both together")
    axes.set(title="OkTopk: words that the mean rank sends / k")


def plot_seconds(outcome: dict[str, Any], axes: Any) -> None:
    predicted = by_scheme([*last_steps(outcome["results"]), *outcome["dense"]], "seconds", 1)
    for scheme, (sizes, values) in predicted.items():
        axes.plot(sizes, values, marker="o", markersize=4, color=COLORS[scheme],
                  label="dense (Table 1)" if scheme == "dense" else scheme)
    for scheme, (sizes, values) in by_scheme(outcome["measured"], "seconds", 1).items():
        axes.plot(sizes, values, "*", markersize=10, color=COLORS[scheme], markeredgecolor="black",
                  markeredgewidth=0.5)
    if outcome["measured"]:
        axes.plot([], [], "*", markersize=10, color="white", markeredgecolor="black",
                  label="measured on a cluster, with computation")
    axes.set(title=f"Seconds of a step, predicted: {outcome['latency']}, {outcome['bandwidth']}")
