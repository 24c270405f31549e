"""The table of predictions, and the verdict from it."""

from __future__ import annotations

from ..schemes.oktopk import OkTopk
from ..vectors.wire import WORD
from .model import Network, Prediction, predict

ACCURACY = """\
Accuracy, measured at density 1 %:
dense: the reference.
OkTopk: loses accuracy. On 4 ranks an LSTM's loss was 23 % above dense's after as many steps, with a tuned rate.
StepAhead(OkTopk): close to dense on few ranks. On 4 the LSTM's loss was 1.8 % above dense's, with nothing tuned, on
16 ranks 5.6 %. On 4 ranks a GPT reached dense's loss in 1.14 times dense's steps.
See docs/guides/accuracy.md and docs/benchmarks.md."""
"""Effects on accuracy, which the predicted seconds do not show."""


def report(n: int, size: int, options: OkTopk, network: Network, selection_seconds: float) -> str:
    """Return the table, the verdict and the known accuracy, as text; see `predict`."""
    dense, *sparse = predict(n, size, options, network, selection_seconds)
    width, ahead = len(sparse[-1].scheme), sparse[-1]
    lines = [f"{n:,} parameters, {size} ranks, density {options.density:g}; {network.bandwidth / 1e9:g} Gbit/s, "
             f"{1e6 * network.latency:g} us; a step of all ranks, predicted:", "",
             f"{'scheme':<{width}} {'sent, at most':>16} {'communication':>15} {'sparsification':>15} "
             f"{'together':>12}"]
    lines += [f"{p.scheme:<{width}} {p.words * WORD / 1e6:>13.2f} MB {1e3 * p.communication:>12.2f} ms "
              f"{1e3 * p.sparsification:>12.2f} ms {1e3 * p.seconds:>9.2f} ms" for p in (dense, *sparse)]
    hidden = (f"Over MPI StepAhead's communication is hidden behind the next step, if computing that takes at least "
              f"{1e3 * ahead.communication:.2f} ms: then {1e3 * ahead.sparsification:.2f} ms remain of it.")
    return "\n".join([*lines, "", _verdict(dense, sparse), hidden, "", ACCURACY])


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
    """Return the Gbit/s from which on dense is faster."""
    overhead = scheme.sparsification + scheme.latency - dense.latency
    return (dense.words - scheme.words) * WORD * 8 / overhead / 1e9 if overhead > 0 else float("inf")
