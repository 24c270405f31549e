"""Bad input: a clear error, before any communication, and the job goes on."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_oktopk import OkTopk, Partial, PluginError, TopkA
from tests.scenarios.common import (
    DENSE,
    SHAPES,
    assert_disagreement,
    assert_options_must_agree,
    gradients,
    is_last,
    needs,
    needs_ranks,
    raised_everywhere,
)
from tests.scenarios.driver import Kind


def one_step(kind: Kind, compression: Any, shapes: dict[str, tuple[int, ...]] = SHAPES, **arguments: Any) -> None:
    trainer = kind(compression, shapes=shapes, **arguments)
    trainer.step({name: np.ones(shape, np.float32) for name, shape in shapes.items()})


def check_adasum_min_and_product_are_refused(kind: Kind) -> None:
    hvd = kind.hvd
    for op in (hvd.Adasum, hvd.Min, hvd.Product):
        messages = raised_everywhere(hvd, kind.op_error, lambda op=op: one_step(kind, DENSE, op=op))
        assert "Average" in messages[0]
        assert "Sum" in messages[0]


def check_join_is_refused(kind: Kind) -> None:
    trainer = kind(DENSE)
    trainer.step(gradients(0, kind.hvd.rank()))
    assert "hvd.join()" in raised_everywhere(kind.hvd, PluginError, kind.hvd.join)[0]


def check_different_options(kind: Kind) -> None:
    hvd = kind.hvd
    needs_ranks(hvd)
    assert_options_must_agree(
        kind, (OkTopk(density=0.2), OkTopk(density=0.1), f"rank {hvd.size() - 1} has", "density: 0.2"),
        (TopkA, OkTopk, "compression: TopkA", "compression: OkTopk"),
        (OkTopk(threshold_interval=7), OkTopk(threshold_interval=8),
         "threshold_interval: 7", "threshold_interval: 8"),
        (OkTopk(density=0.1, global_density=0.2), OkTopk(density=0.1, global_density=0.3),
         "global_density: 0.3 at density 0.1", "global_density: 0.2 at density 0.1"))
    assert_disagreement(hvd, lambda: one_step(kind, DENSE, op=hvd.Sum if is_last(hvd) else hvd.Average), "op: Sum",
                        "op: Average")


def check_different_names_shapes_and_dtypes(kind: Kind) -> None:
    hvd = kind.hvd
    needs_ranks(hvd)
    renamed = {("z" if name == "d" and is_last(hvd) else name): shape for name, shape in SHAPES.items()}
    assert_disagreement(hvd, lambda: one_step(kind, OkTopk(density=0.05), renamed), "parameter d", "parameter z")
    reshaped = {**SHAPES, "a.bias": (12,) if is_last(hvd) else (11,)}
    assert_disagreement(hvd, lambda: one_step(kind, OkTopk(density=0.05), reshaped), "(11,)", "(12,)")
    dtype = "float16" if is_last(hvd) else "bfloat16"
    assert_disagreement(hvd, lambda: one_step(kind, OkTopk(density=0.05), dtype=dtype), " float16", "bfloat16")


def check_partial_is_refused_where_it_cannot_work(kind: Kind) -> None:
    hvd = kind.hvd
    needs_ranks(hvd)
    needs(not kind.runs_partial, "a job in which partial rounds cannot work")
    messages = raised_everywhere(hvd, PluginError, lambda: one_step(kind, Partial(policy="solo")))
    assert ("horovodrun --mpi" if kind.supports("partial") else "DistributedOptimizer") in messages[0]


def check_transports(kind: Kind) -> None:
    hvd = kind.hvd
    needs_ranks(hvd)
    if hvd.mpi_enabled():
        one_step(kind, OkTopk(transport="mpi"))
        assert_disagreement(hvd, lambda: one_step(kind, OkTopk(transport="mpi" if is_last(hvd) else "horovod")),
                            "mpi", "horovod")
    else:
        messages = raised_everywhere(hvd, PluginError, lambda: one_step(kind, OkTopk(transport="mpi")))
        assert "horovodrun --mpi" in messages[0]
    one_step(kind, OkTopk(transport="horovod"))
