"""The adviser: Table 1's arithmetic, hosts of several ranks, the point from which dense wins, and bad input."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk import OptionError, advise
from horovod_oktopk.__main__ import ranks_of_each_host
from horovod_oktopk.advise import HIERARCHICAL, Host
from horovod_oktopk.transport.local import run_ranks

N, P, DENSITY = 10_000_000, 16, 0.01
NETWORK = advise.Network(latency=50e-6, bandwidth=1e9)


def predictions(network=NETWORK, size=P, density=DENSITY, selection=0.02, host=advise.ALONE):
    return {p.scheme: p for p in advise.predict(N, size, density, network, selection, host=host)}


CODED = 0.634
"""Words of an element with its index in Elias-Fano code at density 1 %, to the two of Table 1."""


def test_words_are_those_of_table_1_with_coded_indices():
    k = DENSITY * N * CODED
    words = {scheme: p.words for scheme, p in predictions().items()}
    assert words["dense"] == 2 * N * 15 / 16
    assert words["OkTopk"] == pytest.approx(6 * k * 15 / 16, rel=1e-3)
    assert words["TopkA"] == words["GaussianK"] == pytest.approx(2 * k * 15, rel=1e-3)
    assert words["GTopk"] == pytest.approx(4 * k * 4, rel=1e-3)
    assert 4 * k * 15 / 16 <= words["TopkDSA"] <= (2 * k + N) * 15 / 16


def test_what_is_kept_of_the_sum_counts_in_phase_2():
    def words(global_density):
        return {p.scheme: p.words for p in advise.predict(N, P, DENSITY, NETWORK, 0.02, global_density)}

    k, more = DENSITY * N * CODED, words(0.04)
    assert more["OkTopk"] == pytest.approx((2 * k + 4 * 4 * k) * 15 / 16, rel=1e-3)
    assert words(1.0)["OkTopk"] == pytest.approx((2 * k + 4 * P * k) * 15 / 16, rel=1e-3)
    assert {**more, "OkTopk": words(None)["OkTopk"]} == words(None)


def test_seconds_are_words_over_bandwidth_and_messages_times_latency():
    dense = predictions()["dense"]
    assert dense.transfer == pytest.approx(2 * N * 15 / 16 * 32 / 1e9)
    assert dense.latency == pytest.approx(2 * 4 * 50e-6)
    assert dense.seconds == dense.transfer + dense.latency
    assert predictions()["OkTopk"].sparsification == 0.02


def test_messages_that_fly_at_once_have_one_latency():
    """Of 71 others: eight batches of nine. Then four collectives of seven rounds; each other rank is told twice."""
    assert predictions(size=72)["OkTopk"].latency == pytest.approx((8 + 4 * 7) * 50e-6 + 2 * 71 * 2e-6)


def test_fill_in_makes_topkdsa_dense_at_many_ranks():
    k = DENSITY * N * CODED
    assert predictions(size=1024)["TopkDSA"].words == pytest.approx((2 * k + N) * 1023 / 1024, rel=1e-3)


def test_one_rank_moves_nothing():
    assert all(p.words == p.communication == 0 for p in predictions(size=1).values())


HOST = Host(ranks=4, memory=50e9)


def test_ranks_of_a_host_share_its_link():
    """A rank sends 12 of its 15 messages to other hosts, and four ranks do so."""
    alone, shared = predictions(), predictions(host=HOST)
    for scheme in ("OkTopk", "TopkA", "TopkDSA", "GaussianK"):
        assert shared[scheme].words == pytest.approx(4 * 12 / 15 * alone[scheme].words)
        assert shared[scheme].latency == alone[scheme].latency
        assert shared[scheme].sparsification == alone[scheme].sparsification


def test_a_ring_and_a_tree_in_the_order_of_hosts_cross_a_link_once_for_all_of_its_ranks():
    assert predictions(host=HOST)["dense"] == predictions()["dense"]
    k = DENSITY * N * CODED
    assert predictions(host=HOST)["GTopk"].words == pytest.approx(4 * k * 2, rel=1e-3)  # two of the four levels
    assert predictions(size=12, host=Host(3, 1e9))["GTopk"].words == pytest.approx(4 * k * 3, rel=1e-3)


def test_a_host_that_is_one_worker_sends_what_one_rank_would():
    hosts, flat = predictions(host=HOST), predictions(size=4)
    assert hosts[HIERARCHICAL].words == flat["OkTopk"].words
    assert hosts["OkTopk"].words == pytest.approx(4 * hosts[HIERARCHICAL].words)
    assert HIERARCHICAL not in flat


def test_a_host_that_is_one_worker_pays_for_adding_up_gradients():
    """A rank's passes are over a quarter of the elements, and 3n words cross memory two and a half times."""
    assert advise.host_sum_seconds(N, HOST) == pytest.approx(2.5 * 3 * N * 4 / 50e9)
    found = predictions(host=HOST)[HIERARCHICAL]
    assert found.sparsification == pytest.approx(0.02 / 4 + 2.5 * 3 * N * 4 / 50e9)


def test_all_ranks_of_hosts_agree_and_search_and_hosts_exchange():
    """16 ranks on 4 hosts: three messages at once, three collectives of four rounds and two of two."""
    assert predictions(host=HOST)[HIERARCHICAL].latency == pytest.approx((1 + 3 * 4 + 2 * 2) * 50e-6 + 2 * 3 * 2e-6)


@pytest.mark.parametrize(("size", "message"), [(10, "10 ranks do not fill hosts of 4"), (4, "4 ranks on one host")])
def test_ranks_that_do_not_fill_hosts_are_refused(size, message):
    with pytest.raises(OptionError, match=message):
        predictions(size=size, host=HOST)


def test_the_cluster_of_the_documentation():
    """Four hosts of two ranks: measured were 239 and 122 ms at 100 Mbit/s, 38 and 40 at 1 Gbit/s."""
    def faster(bandwidth):
        network = advise.Network(50e-6, bandwidth)
        table = advise.predict(14_728_266, 8, 0.01, network, 0.009, host=Host(2, 13.9e9))
        found = {p.scheme: p.seconds for p in table}
        return found["OkTopk"] / found[HIERARCHICAL]

    assert faster(1e8) == pytest.approx(239 / 122, rel=0.1)
    assert faster(1e9) == pytest.approx(38 / 40, rel=0.35)


@pytest.mark.parametrize(("bandwidth", "memory", "said"), [
    (1e8, 50e9, "times faster, though adding up gradients on it takes 6.00 ms: use OkTopk(hierarchical=True)"),
    (25e9, 10e9, "times slower, as adding up gradients on it takes 30.00 ms: stay with OkTopk()"),
    (25e9, 15e9, "about as fast as without: adding up gradients on it takes 20.00 ms. Compare OkTopk(hier")])
def test_the_report_says_whether_hosts_should_be_workers(bandwidth, memory, said):
    text = advise.report(N, P, DENSITY, advise.Network(50e-6, bandwidth), 0.02, host=Host(4, memory))
    assert said in text
    assert "16 ranks on 4 hosts" in text
    assert f"{memory / 1e9:g} GB/s through memory" in text
    assert f"\n{HIERARCHICAL} " in text


def test_without_hosts_the_report_does_not_speak_of_them():
    assert "hierarchical" not in advise.report(N, P, DENSITY, NETWORK, 0.02)


@given(st.floats(1e6, 1e12), st.floats(1e-7, 1e-2), st.integers(2, 512), st.floats(1e-4, 1.0))
def test_the_verdict_follows_the_table(bandwidth, latency, size, density):
    network = advise.Network(latency, bandwidth)
    dense, *others = advise.predict(N, size, density, network, 0.02)
    text = advise.report(N, size, density, network, 0.02)
    assert ("Dense wins" in text) == (min(p.seconds for p in others) >= dense.seconds)


def test_at_the_crossing_dense_and_the_best_scheme_take_the_same_time():
    text = advise.report(N, P, DENSITY, NETWORK, 0.02)
    crossing = float(text.split("dense wins from about ")[1].split()[0]) * 1e9
    at = predictions(advise.Network(NETWORK.latency, crossing))
    best = min(p.seconds for scheme, p in at.items() if scheme != "dense")
    assert at["dense"].seconds == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize(("text", "value"), [("10gbit", 1e10), ("940mbit/s", 9.4e8), ("1e9bit", 1e9), ("1 Gbps", 1e9),
                                             ("2.5Gbit", 2.5e9), ("25GBIT", 2.5e10), ("400Gb/s", 4e11)])
def test_bandwidths(text, value):
    assert advise.parse_bandwidth(text) == value


@pytest.mark.parametrize(("text", "value"), [("50us", 50e-6), ("0.1ms", 1e-4), ("5e-5s", 5e-5), ("900ns", 9e-7)])
def test_latencies(text, value):
    assert advise.parse_latency(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "fast", "0gbit", "-1gbit", "10gb", "nan", "1e999gbit", "10", "1e9", "10g",
                                  "25GBps", "25GB/s"])
def test_a_bandwidth_that_makes_no_sense_is_refused(text):
    with pytest.raises(OptionError, match="10gbit"):
        advise.parse_bandwidth(text)


@pytest.mark.parametrize(("text", "value"), [("50GB/s", 5e10), ("800mB/s", 8e8), ("25GBps", 2.5e10),
                                             ("1.5 TB/s", 1.5e12)])
def test_memory_bandwidths(text, value):
    assert advise.parse_memory_bandwidth(text) == value


@pytest.mark.parametrize("text", ["", "50", "50GB", "0GB/s", "-1GB/s", "50gbit/s", "50Gbps", "400Gb/s"])
def test_a_memory_bandwidth_that_makes_no_sense_is_refused(text):
    with pytest.raises(OptionError, match="50GB/s"):
        advise.parse_memory_bandwidth(text)


@pytest.mark.parametrize("text", ["", "50", "0us", "-1us", "1m"])
def test_a_latency_that_makes_no_sense_is_refused(text):
    with pytest.raises(OptionError, match="50us"):
        advise.parse_latency(text)


def test_selection_is_measured():
    assert 0 < advise.measure_selection(100_000, 0.01) < 10


@pytest.mark.parametrize("ranks", [1, 3])
def test_memory_is_measured(ranks):
    assert 1e7 < advise.measure_memory(ranks, repeats=2) < 1e13


def job(size, local_size, homogeneous=True):
    return SimpleNamespace(size=lambda: size, local_size=lambda: local_size, is_homogeneous=lambda: homogeneous)


def test_a_job_tells_how_many_ranks_a_host_has():
    assert ranks_of_each_host(job(8, 2)) == 2
    assert ranks_of_each_host(job(8, 8)) == 1  # on one host every rank has what is measured between them
    with pytest.raises(OptionError, match="different numbers of ranks; with --ranks-per-host 1"):
        ranks_of_each_host(job(8, 3, homogeneous=False))


def test_all_ranks_measure_the_same_network():
    found = run_ranks(3, lambda transport: advise.measure_network(transport, repeats=3), timeout=60)
    assert len(set(found)) == 1
    assert found[0].latency > 0
    assert found[0].bandwidth > 0


def command(*arguments):
    line = [sys.executable, "-m", "horovod_oktopk", "advise", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_the_command_prints_the_table():
    done = command("--parameters", "200000", "--ranks", "8", "--bandwidth", "1gbit")
    assert done.returncode == 0
    for scheme in ("dense", "OkTopk", "TopkA", "TopkDSA", "GTopk", "GaussianK"):
        assert f"\n{scheme} " in done.stdout


def test_the_command_compares_hosts_as_workers():
    done = command("--parameters", "200000", "--ranks", "8", "--ranks-per-host", "2", "--bandwidth", "1gbit")
    assert done.returncode == 0
    assert "8 ranks on 4 hosts" in done.stdout
    assert f"\n{HIERARCHICAL} " in done.stdout
    assert "With each host as one worker OkTopk is " in done.stdout


def test_the_command_takes_a_memory_bandwidth():
    line = ["--parameters", "200000", "--ranks", "8", "--ranks-per-host", "2", "--bandwidth", "1gbit"]
    done = command(*line, "--memory-bandwidth", "20GB/s")
    assert ", 20 GB/s through memory; " in done.stdout
    assert "adding up gradients on it takes 0.10 ms" in done.stdout


@pytest.mark.parametrize(("arguments", "message"), [
    (["--parameters", "0", "--ranks", "8", "--bandwidth", "1gbit"], "--parameters must be at least 1"),
    (["--parameters", "9", "--ranks", "0", "--bandwidth", "1gbit"], "--ranks must be at least 1"),
    (["--parameters", "9", "--ranks", "2", "--bandwidth", "1gbit", "--density", "0"], "density must be in (0, 1]"),
    (["--parameters", "9", "--ranks", "2", "--bandwidth", "10gbit", "--global-density", "2"],
     "global_density must be in (0, 1]"),
    (["--parameters", "9", "--ranks", "2", "--bandwidth", "10"], "with its unit, such as 10gbit"),
    (["--parameters", "9", "--ranks", "2", "--bandwidth", "1gbit", "--latency", "5"], "with its unit, such as 50us"),
    (["--parameters", "9", "--ranks", "8", "--bandwidth", "1gbit", "--ranks-per-host", "0"],
     "--ranks-per-host must be at least 1; got 0"),
    (["--parameters", "9", "--ranks", "8", "--bandwidth", "1gbit", "--ranks-per-host", "3"],
     "8 ranks do not fill hosts of 3: --ranks must be a multiple of --ranks-per-host"),
    (["--parameters", "9", "--ranks", "8", "--bandwidth", "1gbit", "--ranks-per-host", "8"],
     "8 ranks on one host send nothing over its link"),
    (["--parameters", "9", "--ranks", "8", "--bandwidth", "1gbit", "--memory-bandwidth", "1gbit"],
     "with its unit, such as 50GB/s; got '1gbit'"),
    (["--parameters", "9"], "--ranks and --bandwidth are needed")])
def test_the_command_says_what_is_wrong(arguments, message):
    done = command(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
