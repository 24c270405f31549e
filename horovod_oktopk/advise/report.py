"""The table of predictions, and what follows from it."""

from __future__ import annotations

from ..vectors.wire import WORD
from .model import ALONE, HIERARCHICAL, Host, Network, Prediction, host_sum_seconds, predict

LINK = "on a host's link"
CLEARLY = 1.2
"""By less than this factor the model cannot tell which of two is faster."""


def report(n: int, size: int, density: float, network: Network, selection_seconds: float,
           global_density: float | None = None, host: Host = ALONE) -> str:
    """The table, and the verdict; see `predict`."""
    predictions = predict(n, size, density, network, selection_seconds, global_density, host)
    by_scheme = {p.scheme: p for p in predictions}
    width = max(map(len, by_scheme))
    place, memory = f"{size} ranks", ""
    if host.ranks > 1:
        place += f" on {size // host.ranks} hosts"
        memory = f", {host.memory / 1e9:.3g} GB/s through memory"
    lines = [f"{n:,} parameters, {place}, density {density:g}; {network.bandwidth / 1e9:g} Gbit/s, "
             f"{1e6 * network.latency:g} us{memory}; a step of all ranks, predicted:", "",
             f"{'scheme':<{width}} {LINK:>16} {'communication':>15} {'sparsification':>15} "
             f"{'together':>12}"]
    lines += [f"{p.scheme:<{width}} {p.words * WORD / 1e6:>13.2f} MB {1e3 * p.communication:>12.2f} ms "
              f"{1e3 * p.sparsification:>12.2f} ms {1e3 * p.seconds:>9.2f} ms" for p in predictions]
    if host.ranks > 1:
        lines += ["", _of_hosts(by_scheme["OkTopk"], by_scheme[HIERARCHICAL], host_sum_seconds(n, host))]
    return "\n".join([*lines, "", _verdict(predictions[0], predictions[1:])])


def _of_hosts(flat: Prediction, hierarchical: Prediction, adding: float) -> str:
    costs, faster = f"adding up gradients on it takes {1e3 * adding:.2f} ms", flat.seconds / hierarchical.seconds
    if 1 / CLEARLY < faster < CLEARLY:
        return (f"With each host as one worker OkTopk is about as fast as without: {costs}. Compare "
                "OkTopk(hierarchical=True) and OkTopk().")
    if faster > 1:
        return (f"With each host as one worker OkTopk is {faster:.1f} times faster, though {costs}: use "
                "OkTopk(hierarchical=True). A host selects as much then as each of its ranks does otherwise.")
    return f"With each host as one worker OkTopk is {1 / faster:.1f} times slower, as {costs}: stay with OkTopk()."


def _verdict(dense: Prediction, sparse: list[Prediction]) -> str:
    best = min(sparse, key=lambda p: p.seconds)
    if best.seconds >= dense.seconds:
        return (f"Dense wins: it takes {1e3 * dense.seconds:.2f} ms, the best sparse scheme ({best.scheme}) "
                f"{1e3 * best.seconds:.2f} ms. Do not compress here.")
    crossing = max(_crossing(dense, p) for p in sparse)
    return (f"{best.scheme} is {dense.seconds / best.seconds:.1f} times faster than dense; dense wins from about "
            f"{crossing:.3g} Gbit/s on. Horovod hides part of a dense allreduce behind the backward pass, and sparse "
            "updates are not the dense ones: compare both in a training run of your own.")


def _crossing(dense: Prediction, scheme: Prediction) -> float:
    """Gbit/s from which on dense is faster."""
    overhead = scheme.sparsification + scheme.latency - dense.latency
    return (dense.words - scheme.words) * WORD * 8 / overhead / 1e9 if overhead > 0 else float("inf")
