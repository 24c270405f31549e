"""Gradients in several buckets: what one bucket promises holds for all of them together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from horovod_oktopk import OkTopk
from tests.scenarios.common import (
    SHAPES,
    N,
    assert_disagreement,
    assert_equal_everywhere,
    everywhere,
    flat,
    gradients,
    is_last,
    needs_ranks,
    shared_folder,
    topk,
    total,
)
from tests.scenarios.driver import Gradients, Kind
from tests.scenarios.features import assert_like_stock
from tests.scenarios.sparse import SCHEMES

ALONE = OkTopk(density=0.2, bucket_bytes=1)
"""Every gradient is a bucket of its own."""


def poisoned(kind: Kind, name: str) -> Gradients:
    """Gradients that are not finite on the last rank, in one parameter."""
    grads = gradients(9, kind.hvd.rank())
    if is_last(kind.hvd):
        grads[name].flat[0] = np.nan
    return grads


def check_buckets_at_density_1_are_like_stock(kind: Kind) -> None:
    for bucket_bytes in (1, 60, 1 << 20):
        assert_like_stock(kind, OkTopk(density=1.0, bucket_bytes=bucket_bytes))


def check_every_bucket_has_its_own_topk_and_residual(kind: Kind) -> None:
    trainer = kind(ALONE, op=kind.hvd.Sum)
    cuts = np.cumsum([np.prod(SHAPES[name]) for name in sorted(SHAPES)])[:-1]
    residuals, expected = np.zeros((kind.hvd.size(), N)), np.zeros(N)
    for step in range(5):
        trainer.step(gradients(step, kind.hvd.rank()))
        residuals += [flat(gradients(step, rank)) for rank in range(kind.hvd.size())]
        for start, stop in zip([0, *cuts], [*cuts, N], strict=True):
            rows, k = residuals[:, start:stop], max(1, round(0.2 * (stop - start)))
            local = np.array([topk(row, k) for row in rows])
            update = topk(local.sum(axis=0), k)
            rows[(local != 0) & (update != 0)] = 0
            expected[start:stop] -= update
        assert np.array_equal(flat(trainer.values()), expected), f"step {step}"
        assert np.array_equal(trainer.residual(), residuals[kind.hvd.rank()]), f"step {step}"


def check_the_report_counts_all_buckets(kind: Kind) -> None:
    trainer = kind(ALONE)
    trainer.step(gradients(0, kind.hvd.rank()))
    report = trainer.report()
    assert (report.step, report.n) == (1, N)
    assert report.k == sum(max(1, round(0.2 * np.prod(shape))) for shape in SHAPES.values())
    assert report.local_selected <= report.k
    totals = everywhere(kind.hvd, (report.bytes_sent, report.bytes_received))
    assert sum(sent for sent, _ in totals) == sum(received for _, received in totals)
    trainer.set_density(1.0)
    trainer.step(gradients(1, kind.hvd.rank()))
    assert trainer.report().k == N


def check_nan_in_any_bucket_undoes_all_with_every_scheme(kind: Kind) -> None:
    for name, options in SCHEMES.items():
        trainer = kind(replace(options, bucket_bytes=60), op=kind.hvd.Sum)
        for step in range(4):
            trainer.step(gradients(step, kind.hvd.rank()))
            for parameter in SHAPES if step == 1 else ():
                values, before = trainer.values(), trainer.residual()
                trainer.step(poisoned(kind, parameter))
                assert not trainer.report().finite, name
                assert not np.isfinite(flat(trainer.values())).any(), f"{name}: NaN in {parameter}"
                assert trainer.residual().tobytes() == before.tobytes(), f"{name}: NaN in {parameter}"
                trainer.assign(values)
        assert trainer.report().finite, name
        assert_equal_everywhere(kind.hvd, trainer.values())
        held = sum(everywhere(kind.hvd, trainer.residual()))
        assert np.array_equal(held - flat(trainer.values()), sum(total(kind.hvd, step) for step in range(4))), name


def check_an_overflow_in_one_bucket_undoes_all(kind: Kind) -> None:
    shapes = {"a": (4,), "b": (4,)}
    for large in shapes:
        trainer = kind(OkTopk(density=0.5, bucket_bytes=1), dtype="float16", shapes=shapes, op=kind.hvd.Sum)
        trainer.step({name: np.full(4, 60000.0 if name == large else 1.0, np.float16) for name in shapes})
        overflows = kind.hvd.size() > 1
        assert trainer.report().finite != overflows, large
        assert int((trainer.residual() == 0).sum()) == (8 if overflows else 4), large


def check_different_buckets_are_a_disagreement(kind: Kind) -> None:
    needs_ranks(kind.hvd)
    for odd, expected in ((OkTopk(density=0.1, bucket_bytes=61), "bucket_bytes: 61"),
                          (OkTopk(density=0.1), "bucket_bytes: None")):
        trainer = kind(odd if is_last(kind.hvd) else OkTopk(density=0.1, bucket_bytes=60))
        assert_disagreement(kind.hvd, lambda trainer=trainer: trainer.step(gradients(0, kind.hvd.rank())), expected)
    shapes = {**SHAPES, "a.bias": (12,)} if is_last(kind.hvd) else SHAPES  # not in the first bucket
    trainer = kind(OkTopk(density=0.1, bucket_bytes=1), shapes=shapes)
    step = gradients(0, kind.hvd.rank(), shapes=shapes)
    assert_disagreement(kind.hvd, lambda: trainer.step(step), "a.bias", "(12,)")


def check_a_resumed_run_of_buckets_gives_the_same_bits(kind: Kind) -> None:
    options = OkTopk(density=0.1, selection="reuse", threshold_interval=4, region_interval=5,
                     bucket_bytes=60)
    trainer = kind(options, op=kind.hvd.Sum)
    for step in range(6):
        trainer.step(gradients(step, kind.hvd.rank()))
    values, held = trainer.values(), trainer.residual()
    with shared_folder(kind.hvd) as folder:
        trainer.save(f"{folder}/state")
        for step in range(6, 10):
            trainer.step(gradients(step, kind.hvd.rank()))
        for other in (60, None, 1):
            resumed = kind(replace(options, bucket_bytes=other), op=kind.hvd.Sum)
            resumed.assign(values)
            resumed.load(f"{folder}/state")
            for step in range(6, 10):
                resumed.step(gradients(step, kind.hvd.rank()))
            if other == 60:
                assert np.array_equal(resumed.residual(), trainer.residual())
                assert np.array_equal(flat(resumed.values()), flat(trainer.values()))
            kept = sum(everywhere(kind.hvd, resumed.residual())) - flat(resumed.values())
            assert np.array_equal(kept, sum(total(kind.hvd, step) for step in range(10))), other
            assert resumed.report().step == 10
        everywhere(kind.hvd, "done with the file")
    assert held.any()
