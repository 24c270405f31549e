"""The simulation of hosts with several ranks: what crosses their links, and what that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.paper.simulated_links import LinkLog, LinkTransport
from benchmarks.paper.simulated_ranks import Job, PopularElements, simulate
from horovod_oktopk import OkTopk
from horovod_oktopk.phases.volume import oktopk_bound
from horovod_oktopk.schemes.report import StepReport
from horovod_oktopk.vectors.wire import WireCodec
from tests.support.threads import run_ranks
from tests.test_benchmarks import outcome

N, K, L = 50000, 1000, 4
MEMORY = 1e10
WORDS = WireCodec(np.dtype("float32")).size(K, N) / 4
"""Of a message with k elements."""


def crossings(size: int, ranks_per_host: int, call: Any) -> list[Any]:
    """Of each rank, in its first phase, after call(transport)."""
    def program(inner: Any) -> Any:
        transport = LinkTransport(inner, LinkLog(), places=np.arange(size) // ranks_per_host)
        call(transport)
        return transport.log.crossings["agree"]

    return run_ranks(size, program)


def by_dissemination(size: int, ranks_per_host: int) -> int:
    """Blocks on the link of a host: at distance d so many of its ranks have their partner elsewhere."""
    distances = [1 << level for level in range((size - 1).bit_length())]
    return sum(min(d, ranks_per_host, size - d) * min(d, size - d) for d in distances)


@pytest.mark.parametrize(("size", "ranks_per_host"), [(4, 2), (6, 3), (8, 4), (12, 2), (12, 3), (16, 8), (5, 1)])
def test_an_allgather_leaves_a_host_as_its_rounds_do_or_once_as_a_ring(size, ranks_per_host):
    found = crossings(size, ranks_per_host, lambda transport: transport.allgather(np.zeros(2, np.int64)))
    for host in range(0, size, ranks_per_host):
        ranks = found[host:host + ranks_per_host]
        for way, blocks in (("tree", by_dissemination(size, ranks_per_host)), ("ring", size - 1)):
            ways = [getattr(crossing, way) for crossing in ranks]
            assert sum(w.left for w in ways) == pytest.approx(16 * blocks)
            assert sum(w.came for w in ways) == pytest.approx(sum(w.left for w in ways))
    assert {crossing.tree.rounds for crossing in found} == {(size - 1).bit_length()}
    assert {crossing.ring.rounds for crossing in found} == {size - 1}


def test_an_alltoall_tells_each_rank_and_an_allreduce_takes_twice_the_rounds():
    found = crossings(6, 2, lambda transport: transport.alltoall(np.zeros((6, 1), np.int64)))
    for crossing in found:
        assert (crossing.tree.rounds, crossing.tree.messages, crossing.tree.away) == (1, 5, 4)
        assert crossing.tree.left == crossing.tree.came == pytest.approx(8 * 4)
    found = crossings(6, 2, lambda transport: transport.allreduce(np.zeros(6, np.int64)))
    for rank, crossing in enumerate(found):
        assert crossing.tree.rounds == 2 * 3
        assert crossing.tree.left == pytest.approx(2 * 8 * 5 * 4 / 5)
        assert crossing.ring.left == (rank % 2) * 2 * 8 * 5


def test_messages_are_counted_by_where_they_go():
    """Every rank sends to the next two, so many bytes as its number; ranks 1 and 2 are on other hosts."""
    def send(transport):
        rank = transport.rank
        outgoing = {(rank + step) % 4: np.zeros(rank + 1, np.uint8) for step in (1, 2)}
        incoming = {(rank - step) % 4: (rank - step) % 4 + 1 for step in (1, 2)}
        list(transport.exchange(outgoing, incoming))

    found = crossings(4, 2, send)
    assert [crossing.tree.left for crossing in found] == [1, 2 * 2, 3, 2 * 4]
    assert [crossing.tree.came for crossing in found] == [3 + 4, 4, 1 + 2, 2]
    assert [(crossing.tree.away, crossing.tree.rounds, crossing.tree.messages) for crossing in found] == [
        (1, 1, 2), (2, 1, 2), (1, 1, 2), (2, 1, 2)]


def test_a_new_count_begins_at_nothing():
    transport = LinkTransport(run_ranks(2, lambda inner: inner)[0], LinkLog(), places=np.arange(2))
    transport.log.crossing.tree.rounds = 3
    transport.reset()
    assert transport.log.crossings == {}


GRADIENTS = PopularElements(N, K, 1.0, 1)


def test_the_ranks_of_a_host_have_what_one_rank_would_have():
    """So they select by the same threshold, and the job has the same update."""
    hosts = simulate(OkTopk(density=K / N), Job(12, L, hierarchical=True), GRADIENTS, 2, lambda: None)
    alone = simulate(OkTopk(density=K / N), Job(3), GRADIENTS, 2, lambda: None)
    for ranks, workers in zip(hosts, alone, strict=True):
        for rank, step in enumerate(ranks):
            worker = workers[rank // L].report
            assert step.report.local_threshold == worker.local_threshold
            assert step.report.global_threshold == worker.global_threshold
            assert step.report.global_selected == worker.global_selected == K


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("hosts")
    return outcome("paper.simulation", folder, "--parameters", str(N), "--density", "0.02", "--ranks", "8", "16",
                   "--ranks-per-host", str(L), "--bandwidth", "1gbit", "10gbit", "--memory-bandwidth", "10")


def results(simulation: dict[str, Any], scheme: str, hierarchical: bool) -> list[dict[str, Any]]:
    return [r for r in simulation["results"] if (r["scheme"], r["hierarchical"]) == (scheme, hierarchical)]


def test_a_host_that_is_one_worker_keeps_the_bound_of_one_rank(simulation):
    found = results(simulation, "OkTopk", True)
    assert [(r["ranks"], r["hosts"], r["step"]) for r in found] == [(8, 2, 1), (8, 2, 2), (16, 4, 1), (16, 4, 2)]
    for r, flat in zip(found, results(simulation, "OkTopk", False), strict=True):
        assert 0.5 * K < r["payload"] <= oktopk_bound(K, r["hosts"])
        assert flat["payload"] == pytest.approx(L * r["payload"], rel=0.2)
        assert flat["words"] > 2 * r["words"]
        assert flat["messages"] > r["messages"]


def test_an_allgather_of_everything_is_counted_on_the_link(simulation):
    for r in results(simulation, "TopkA", False):
        assert r["payload"] == pytest.approx(by_dissemination(r["ranks"], L) * WORDS)
    for r in results(simulation, "TopkA", True):  # shares have indices of their own, and lengths
        assert r["payload"] == pytest.approx((r["hosts"] - 1) * WORDS, rel=0.05)


def test_a_tree_leaves_a_host_at_two_of_its_levels(simulation):
    """What a host's first rank sends on, with a bit each."""
    for r in results(simulation, "GTopk", False):
        assert r["payload"] == pytest.approx((r["hosts"].bit_length() - 1) * (2 * WORDS + 1 + K / 32), rel=0.02)
    assert results(simulation, "GTopk", True) == []


def test_seconds_follow_from_rounds_messages_and_bytes(simulation):
    for r in simulation["results"]:
        link = 0.0
        for name, figures in r["phases"].items():
            latency = 1e-6 if name in StepReport.ON_HOST else 50e-6
            assert figures["seconds"] == pytest.approx(
                figures["rounds"] * latency + figures["messages"] * 2e-6 + 8 * figures["bytes"] / 1e9
                + 2 * figures["on_host"] / MEMORY)
            link += figures["bytes"]
        assert r["adding"] == pytest.approx(2.5 * (L - 1) * 4 * N / MEMORY if r["hierarchical"] else 0)
        assert r["seconds"]["1gbit"] == pytest.approx(r["adding"] + sum(f["seconds"] for f in r["phases"].values()))
        assert r["seconds"]["1gbit"] - r["seconds"]["10gbit"] == pytest.approx(8 * link * (1e-9 - 1e-10))
        assert r["words"] == pytest.approx(link / 4)


def test_what_stays_on_a_host_is_not_on_its_link(simulation):
    for r in results(simulation, "OkTopk", True):
        for name in ("host_select", "host_gather"):
            figures = r["phases"][name]
            assert figures["bytes"] == figures["away"] == 0
            assert figures["on_host"] > 0
            assert figures["rounds"] > 0
    assert not any(name in r["phases"] for r in results(simulation, "OkTopk", False) for name in StepReport.ON_HOST)


def test_dense_crosses_each_link_once(simulation):
    assert [(r["ranks"], r["words"]) for r in simulation["dense"]] == [(8, 2 * N * 7 / 8), (16, 2 * N * 15 / 16)]
    for r in simulation["dense"]:
        assert r["seconds"]["1gbit"] == pytest.approx(32 * r["words"] / 1e9 + 2 * np.log2(r["ranks"]) * 50e-6)


def test_rings_send_less_over_the_link_and_wait_for_more_messages(simulation):
    """Of the roll call, whose rows have 24 bytes, and of the allgather of everyone's top-k."""
    (flat,) = (r for r in results(simulation, "TopkA", False) if r["ranks"] == 16)
    assert flat["seconds_ring"]["1gbit"] == pytest.approx(
        2 * 15 * 52e-6 + 8 * 15 * (4 * WORDS + 24) / 1e9 + 2 * 15 * 3 * (4 * WORDS + 24) / MEMORY, rel=0.01)
