"""The adviser: Table 1's arithmetic, the point from which dense wins, and what it makes of bad input."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk import OptionError, advise
from horovod_oktopk.transport.local import run_ranks

N, P, DENSITY = 10_000_000, 16, 0.01
NETWORK = advise.Network(latency=50e-6, bandwidth=1e9)


def predictions(network=NETWORK, size=P, density=DENSITY, selection=0.02):
    return {p.scheme: p for p in advise.predict(N, size, density, network, selection)}


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


def test_fill_in_makes_topkdsa_dense_at_many_ranks():
    k = DENSITY * N * CODED
    assert predictions(size=1024)["TopkDSA"].words == pytest.approx((2 * k + N) * 1023 / 1024, rel=1e-3)


def test_one_rank_moves_nothing():
    assert all(p.words == p.communication == 0 for p in predictions(size=1).values())


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
    assert at["dense"].seconds == pytest.approx(at["OkTopk"].seconds, rel=0.02)


@pytest.mark.parametrize(("text", "value"), [("10gbit", 1e10), ("940mbit/s", 9.4e8), ("1e9bit", 1e9), ("1 Gbps", 1e9),
                                             ("2.5Gbit", 2.5e9), ("25GBIT", 2.5e10)])
def test_bandwidths(text, value):
    assert advise.parse_bandwidth(text) == value


@pytest.mark.parametrize(("text", "value"), [("50us", 50e-6), ("0.1ms", 1e-4), ("5e-5s", 5e-5), ("900ns", 9e-7)])
def test_latencies(text, value):
    assert advise.parse_latency(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "fast", "0gbit", "-1gbit", "10gb", "nan", "1e999gbit", "10", "1e9", "10g"])
def test_a_bandwidth_that_makes_no_sense_is_refused(text):
    with pytest.raises(OptionError, match="10gbit"):
        advise.parse_bandwidth(text)


@pytest.mark.parametrize("text", ["", "50", "0us", "-1us", "1m"])
def test_a_latency_that_makes_no_sense_is_refused(text):
    with pytest.raises(OptionError, match="50us"):
        advise.parse_latency(text)


def test_selection_is_measured():
    assert 0 < advise.measure_selection(100_000, 0.01) < 10


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


@pytest.mark.parametrize(("arguments", "message"), [
    (["--parameters", "0", "--ranks", "8", "--bandwidth", "1gbit"], "--parameters must be at least 1"),
    (["--parameters", "9", "--ranks", "0", "--bandwidth", "1gbit"], "--ranks must be at least 1"),
    (["--parameters", "9", "--ranks", "2", "--bandwidth", "1gbit", "--density", "0"], "density must be in (0, 1]"),
    (["--parameters", "9", "--ranks", "2", "--bandwidth", "10gbit", "--global-density", "2"],
     "global_density must be in (0, 1]"),
    (["--parameters", "9", "--ranks", "2", "--bandwidth", "10"], "with its unit, such as 10gbit"),
    (["--parameters", "9", "--ranks", "2", "--bandwidth", "1gbit", "--latency", "5"], "with its unit, such as 50us"),
    (["--parameters", "9"], "--ranks and --bandwidth are needed")])
def test_the_command_says_what_is_wrong(arguments, message):
    done = command(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
