"""The accumulator in tensors gives the bits of the NumPy one; on a GPU too, where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from horovod_oktopk.schemes.step_result import EVERYTHING
from horovod_oktopk.selection.accumulator import NumpyAccumulator
from horovod_oktopk.selection.local_top_k import local_top_k
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.torch.accumulator import TorchAccumulator
from horovod_oktopk.torch.layout import TorchLayout
from horovod_oktopk.torch.parameter_accumulator import TorchParameterAccumulator
from horovod_oktopk.torch.replica import TorchReplica, flat_memory
from horovod_oktopk.vectors.sparse import DenseVector, SparseVector

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_same_bits_as_numpy_over_steps(device: str, dtype: type) -> None:
    n, k = 50_000, 700
    ours, reference = TorchAccumulator(n, dtype, torch.device(device)), NumpyAccumulator(n, dtype)
    rng = np.random.default_rng(0)
    for step in range(4):
        gradient = rng.standard_normal(n).astype(dtype)
        halves = [(0, gradient[:n // 3]), (n // 3, gradient[n // 3:])]
        scale = 2.0 if step == 2 else 1.0
        assert reference.accumulate(halves, scale)
        assert ours.accumulate([(at, torch.from_numpy(part).to(device)) for at, part in halves], scale)
        expected, found = local_top_k(reference, k), local_top_k(ours, k)
        assert found[0] == expected[0]
        assert np.array_equal(found[1].indices, expected[1].indices)
        assert np.array_equal(found[1].values, expected[1].values)
        assert ours.select(found[0], limit=k // 2) is None
        for accumulator in (ours, reference):
            accumulator.commit(expected[1].indices[::2])
        assert np.array_equal(ours.residual.cpu().numpy(), reference.residual)


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_gradients_are_accumulated_in_float32(device: str) -> None:
    accumulator = TorchAccumulator(3, np.float32, torch.device(device))
    for dtype in (torch.float16, torch.bfloat16):
        assert accumulator.accumulate([(0, torch.tensor([1.0, 0.5, -2.0], dtype=dtype, device=device))])
        accumulator.commit(np.empty(0, np.int64))
    assert accumulator.residual.tolist() == [2.0, 1.0, -4.0]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_its_own_dtype_are_cleared_where_asked(device: str) -> None:
    accumulator = TorchAccumulator(6, np.float32, torch.device(device))
    own, half = torch.ones(3, device=device), torch.ones(3, device=device, dtype=torch.bfloat16)
    for clear in (False, True):
        assert bool((own == 1).all())
        accumulator.accumulate([(0, own), (3, half)], clear=clear)
    assert not own.any()
    assert bool((half == 1).all())
    assert accumulator.values().tolist() == [1.0] * 6


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_finite_is_told_and_leaves_the_residual(device: str) -> None:
    accumulator = TorchAccumulator(4, np.float32, torch.device(device))
    accumulator.accumulate([(0, torch.ones(4, device=device))])
    accumulator.commit(np.array([2]))
    for poison in (float("nan"), float("inf")):
        assert not accumulator.accumulate([(0, torch.tensor([0.0, poison, 0.0, 0.0], device=device))])
    assert accumulator.accumulate([(0, torch.full((4,), 3e38, device=device))])  # the sum overflows, no element does
    assert accumulator.residual.tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("device", DEVICES)
def test_what_rounding_left_over_is_added_to_the_residual(device: str) -> None:
    remainder = SparseVector(np.array([0, 2]), np.array([0.25, -0.5], np.float32))
    gradient = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    for accumulator, piece in ((TorchAccumulator(4, np.float32, torch.device(device)),
                                torch.from_numpy(gradient).to(device)), (NumpyAccumulator(4), gradient)):
        accumulator.accumulate([(0, piece)])
        assert accumulator.values().tolist() == [1.0, 2.0, 3.0, 4.0]
        accumulator.commit(np.array([0, 3]), remainder)
        assert accumulator.read_residual().tolist() == [0.25, 2.0, 2.5, 0.0]


@pytest.mark.parametrize("device", DEVICES)
def test_where_everything_contributed_nothing_stays(device: str) -> None:
    accumulator = TorchAccumulator(4, np.float32, torch.device(device))
    accumulator.accumulate([(0, torch.ones(4, device=device))])
    accumulator.commit(EVERYTHING)
    assert accumulator.residual.tolist() == [0.0] * 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("threshold", [0.0, 1e-50])
def test_zeros_are_never_selected(device: str, threshold: float) -> None:
    accumulator = TorchAccumulator(4, np.float32, torch.device(device))
    accumulator.accumulate([(0, torch.tensor([0.0, -1.0, 0.0, 1e-45], device=device))])
    found = accumulator.select(threshold, limit=4)
    assert found is not None
    assert found.indices.tolist() == [1, 3]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parameters_have_the_same_bits_as_with_numpy_over_steps(device: str, dtype: type,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 50_000, 700
    monkeypatch.setattr("horovod_oktopk.torch.parameter_accumulator.CHUNK", 7001)
    ours = TorchParameterAccumulator(n, dtype, torch.device(device))
    reference, rng, cuts = NumpyParameterAccumulator(n, dtype), np.random.default_rng(0), [5, 400, 30_000]
    p = rng.standard_normal(n).astype(dtype)

    def pieces() -> tuple[list, list]:
        parts = list(zip([0, *cuts], np.split(p, cuts), strict=True))
        return parts, [(at, torch.from_numpy(part).to(device)) for at, part in parts]

    for accumulator, own in zip((reference, ours), pieces(), strict=True):
        accumulator.start(own)
    for _ in range(4):
        p = p + rng.standard_normal(n).astype(dtype)
        for accumulator, own in zip((reference, ours), pieces(), strict=True):
            assert accumulator.accumulate(own)
        expected, found = local_top_k(reference, k), local_top_k(ours, k)
        assert found[0] == expected[0]
        assert np.array_equal(found[1].indices, expected[1].indices)
        assert np.array_equal(found[1].values, expected[1].values)
        assert ours.select(found[0], limit=k // 2) is None
        assert np.array_equal(ours.values(), reference.values())
        assert np.array_equal(ours.sample(13), reference.sample(13))
        assert ours.moments() == pytest.approx(reference.moments(), rel=1e-4)
        for accumulator in (ours, reference):
            accumulator.commit(expected[1].divided(2))
            accumulator.commit(DenseVector(np.full(n, 0.25, dtype)))
        assert np.array_equal(ours.read_shared(), reference.read_shared())
        for at, part in pieces()[0]:
            w = reference.read_shared()[at:at + len(part)]
            assert np.array_equal(w, w.astype(part.dtype)), "a value of the parameter's dtype"
        assert np.array_equal(ours.minus(p).cpu().numpy(), reference.minus(p))
    p[77] = np.nan
    assert not ours.accumulate(pieces()[1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_replica_writes_into_the_parameters_in_place(device: str) -> None:
    named = {"a": torch.nn.Parameter(torch.arange(6.0, device=device).view(2, 3)),
             "b": torch.nn.Parameter(torch.ones(1, 2, 3, 3, device=device).to(memory_format=torch.channels_last))}
    layout = TorchLayout(named)
    replica = TorchReplica(layout, lambda: [flat_memory(name, p) for name, p in named.items()])
    replica.add(SparseVector(np.array([1, 6, 23]), np.array([10, 20, 30], np.float32)))
    assert named["a"].view(-1).tolist() == [0, 11, 2, 3, 4, 5]
    assert named["b"][0, 0, 0, 0].item() == 21
    assert named["b"][0, 1, 2, 2].item() == 31
    held = torch.arange(24.0, device=device)
    replica.swap(held)
    assert held[1] == 11
    assert named["a"].view(-1).tolist() == [0, 1, 2, 3, 4, 5]
    replica.assign(torch.zeros(24, device=device))
    replica.add(DenseVector(np.arange(24, dtype=np.float32)))
    order = replica.logical(np.arange(24, dtype=np.float32))
    assert named["b"].detach().cpu().contiguous().view(-1).tolist() == order[6:].tolist()
    assert replica.in_memory(order).tolist() == list(range(24))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clear", [False, True])
def test_gradients_of_a_device_come_to_the_hosts_memory(device: str, clear: bool,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its ranks add them up. The CPU stands for a device, where there is none."""
    own, half = torch.ones(3, device=device), torch.ones(2, dtype=torch.bfloat16, device=device)
    layout = TorchLayout({"a": own, "b": half})
    monkeypatch.setattr(layout, "pieces", lambda tensors: zip((0, 3), tensors, strict=True))
    found = [(offset, piece.copy()) for offset, piece in layout.pieces_in_host_memory([own, half], clear)]
    assert [(offset, piece.dtype, piece.tolist()) for offset, piece in found] == [
        (0, np.float32, [1, 1, 1]), (3, np.float32, [1, 1])]
    assert own.tolist() == [0 if clear else 1] * 3
    assert half.tolist() == [1, 1]
