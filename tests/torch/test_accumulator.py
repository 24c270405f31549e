"""The accumulator in tensors gives the bits of the NumPy one; on a GPU too, where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from horovod_oktopk.selection.local_top_k import local_top_k
from horovod_oktopk.selection.parameter_accumulator import NumpyParameterAccumulator
from horovod_oktopk.torch_base.device import DeviceReplica, TorchAccumulator, TorchParameterAccumulator
from horovod_oktopk.torch_base.tensors import DenseGradients, TorchLayout
from horovod_oktopk.vectors.sparse import RunVector, SparseVector
from tests.selection.accumulators import PROGRAMS
from tests.support.runs import runs_of

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_conformance(program: str, device: str) -> None:
    PROGRAMS[program](lambda n, dtype: TorchAccumulator(n, dtype, torch.device(device)),
                      lambda gradient: torch.from_numpy(gradient).to(device))


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_gradients_are_accumulated_in_float32(device: str) -> None:
    accumulator = TorchAccumulator(3, np.float32, torch.device(device))
    half = torch.tensor([1.0, 0.5, -2.0], dtype=torch.bfloat16, device=device)
    for _ in range(2):
        assert accumulator.accumulate([(0, half)], clear=True)
        accumulator.commit(np.empty(0, np.int64))
    assert accumulator.residual.tolist() == [2.0, 1.0, -4.0]
    assert half.tolist() == [1.0, 0.5, -2.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parameters_have_the_same_bits_as_with_numpy_over_steps(device: str, dtype: type,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = 50_000, 700
    monkeypatch.setattr("horovod_oktopk.torch_base.device.CHUNK", 7001)
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
        some = runs_of(np.flatnonzero(rng.random(n) < 0.7))
        assert np.array_equal(ours.elements_at(some), reference.values()[some.indices])
        assert np.array_equal(reference.elements_at(some), reference.values()[some.indices])
        assert ours.moments() == pytest.approx(reference.moments(), rel=1e-4)
        for accumulator in (ours, reference):
            accumulator.commit(expected[1].divided(2))
            accumulator.commit(RunVector.between(0, np.full(n, 0.25, dtype)))
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
    replica = DeviceReplica(layout)
    replica.add(SparseVector(np.array([1, 6, 23]), np.array([10, 20, 30], np.float32)))
    assert named["a"].view(-1).tolist() == [0, 11, 2, 3, 4, 5]
    assert named["b"][0, 0, 0, 0].item() == 21
    assert named["b"][0, 1, 2, 2].item() == 31
    held = torch.arange(24.0, device=device)
    replica.swap(held)
    assert held[1] == 11
    assert named["a"].view(-1).tolist() == [0, 1, 2, 3, 4, 5]
    replica.assign(torch.zeros(24, device=device))
    replica.add(RunVector.between(0, np.arange(24, dtype=np.float32)))
    order = replica.logical(np.arange(24, dtype=np.float32))
    assert named["b"].detach().cpu().contiguous().view(-1).tolist() == order[6:].tolist()
    assert replica.in_memory(order).tolist() == list(range(24))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_a_device_come_to_the_hosts_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's ranks add them up there. The CPU stands for a device, if there is none."""
    own, half = torch.zeros(3, device=device), torch.zeros(2, dtype=torch.bfloat16, device=device)
    own.grad, half.grad = torch.ones_like(own), torch.ones_like(half)
    layout = TorchLayout({"a": own, "b": half})
    monkeypatch.setattr(layout, "device", torch.device("cuda"))
    found = [(offset, piece.copy()) for offset, piece in DenseGradients(layout, in_host_memory=True).pieces()]
    assert [(offset, piece.dtype, piece.tolist()) for offset, piece in found] == [
        (0, np.float32, [1, 1, 1]), (3, np.float32, [1, 1])]
    assert own.grad.tolist() == [0, 0, 0]
    assert half.grad.tolist() == [1, 1]


def test_an_expanded_gradient_gets_zeros_in_memory_of_its_own() -> None:
    """A sum's gradient is one number, expanded."""
    p = torch.zeros(6)
    p.grad = torch.ones(1).expand(6)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        DenseGradients(TorchLayout({"p": p})).write(
            SparseVector(np.array([2]), np.array([5], np.float32)), cleared=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert p.grad.tolist() == [0, 0, 5, 0, 0, 0]


def test_a_digest_tells_one_bit_of_any_parameter_apart_but_for_those_compared_before():
    parts = {"strided": torch.zeros(3, 2)[:, 0], "empty": torch.zeros(0), "number": torch.tensor(1.0),
             "16 bits": torch.ones(2, 3, dtype=torch.bfloat16).t(), "image": torch.zeros(2, 3, 4, 4).to(
                 memory_format=torch.channels_last)}
    found = {TorchLayout(parts).digest()}
    for name in parts.keys() - {"empty"}:
        changed = {**parts, name: torch.nextafter(parts[name], torch.full_like(parts[name], 2))}
        found.add(TorchLayout(changed).digest())
        assert TorchLayout(changed, {changed[name]}).digest() == TorchLayout(parts, {parts[name]}).digest()
    assert len(found) == len(parts)
