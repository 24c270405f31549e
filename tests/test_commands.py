"""`check`; and `advise`: Table 1's arithmetic, when dense wins, what is said of accuracy, and bad input."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_oktopk import OkTopk, OptionError, advise
from horovod_oktopk import __main__ as commands
from tests.launch import ROOT, environment, horovodrun
from tests.support.threads import run_ranks

N, P = 10_000_000, 16
NETWORK = advise.Network(latency=50e-6, bandwidth=1e9)
SCHEMES = ["dense", "OkTopk", "StepAhead(OkTopk)", "StepAhead(SameBlocks)"]
SECONDS = (0.02, 0.03)  # of selecting


def predictions(network=NETWORK, size=P, n=N, options=None):
    return {p.scheme: p for p in advise.predict(n, size, options or OkTopk(), network, *SECONDS)}


def test_vgg_16_on_8_ranks_at_1_gbit_by_hand():
    """In Elias-Fano code an index of one in 100 has 6 + 1 + 100/64 bits, and of one in 12.5, 3 + 1 + 12.5/8."""
    n, k, found = 14_728_266, 147_283, predictions(size=8, n=14_728_266)
    dense, latency = 2 * n * 32, (1 + 4 * 3) * 50e-6 + 2 * 7 * 2e-6
    oktopk = (1 + 2) * k * (32 + 8.5625)  # k in phase 1, and twice k' = k in phase 2
    step_ahead = k * (4 + 8.5625) + 2 * 8 * k * (4 + 5.5625)  # k' = 8 k, all that 8 ranks select
    assert list(found) == SCHEMES
    assert found["dense"].seconds == pytest.approx(dense * 7 / 8 / 1e9 + 2 * 3 * 50e-6)
    assert found["OkTopk"].seconds == pytest.approx(oktopk * 7 / 8 / 1e9 + latency + 0.02, rel=1e-4)
    latency = (1 + 3 * 3) * 50e-6 + 2 * 7 * 2e-6  # all sums are kept, so one collective less
    assert found["StepAhead(OkTopk)"].seconds == pytest.approx(step_ahead * 7 / 8 / 1e9 + latency + 0.02, rel=1e-5)
    blocks = 2 * 0.2 * n * (4 + 16 / 64)  # values of 4 bits, and for each 64 of them a scale of 16
    latency = (1 + 2 * 3) * 50e-6 + 2 * 7 * 2e-6
    assert found["StepAhead(SameBlocks)"].seconds == pytest.approx(blocks * 7 / 8 / 1e9 + latency + 0.03, rel=1e-4)


def test_what_is_kept_of_the_sum_counts_in_phase_2():
    few, many = (predictions(options=OkTopk(global_density=kept)) for kept in (0.04, 1.0))
    k = 0.01 * N / 32
    assert few["OkTopk"].words == pytest.approx(k * (40.5625 + 2 * 4 * 38.5625) * 15 / 16, rel=1e-3)
    assert few["StepAhead(OkTopk)"].words == pytest.approx(k * (12.5625 + 2 * 4 * 10.5625) * 15 / 16, rel=1e-3)
    assert many["StepAhead(OkTopk)"] == predictions()["StepAhead(OkTopk)"]  # all that 16 ranks select


def test_if_more_is_sent_more_is_kept_of_the_sum_as_well():
    """The global density keeps its ratio to the density, as where that sets itself."""
    few, same = (advise.report(N, P, OkTopk(global_density=kept), NETWORK, *SECONDS) for kept in (0.01, None))
    assert [line for line in few.splitlines() if "If OkTopk sends more" in line] == [
        line for line in same.splitlines() if "If OkTopk sends more" in line]


def test_messages_that_fly_at_once_have_one_latency():
    """Messages of 71 others: eight batches of nine. Then four collectives of seven rounds, and each is told twice."""
    for scheme in ("OkTopk", "StepAhead(OkTopk)"):  # which keeps at most what 32 ranks select
        assert predictions(size=72)[scheme].latency == pytest.approx((8 + 4 * 7) * 50e-6 + 2 * 71 * 2e-6)


def test_one_rank_moves_nothing():
    assert all(p.words == p.communication == 0 for p in predictions(size=1).values())


def test_the_report_says_what_is_hidden_and_what_is_lost():
    text, (*_, ahead, blocks) = advise.report(N, P, OkTopk(), NETWORK, *SECONDS), predictions().values()
    assert f"takes at least {1e3 * ahead.communication:.2f} ms with OkTopk: then 20.00 ms remain" in text
    assert f"with SameBlocks {1e3 * blocks.communication:.2f} and 30.00 ms" in text
    much, everything = (predictions(options=OkTopk(density=density))["StepAhead(OkTopk)"] for density in (0.16, 1.0))
    assert f" {1e3 * much.communication:.2f} ms at 16 %, " in text
    assert f" {1e3 * everything.communication:.2f} ms at 100 %: " in text
    assert "sends more" in text
    assert "sends more" not in advise.report(N, P, OkTopk(density=1.0), NETWORK, *SECONDS)
    accuracy = text[text.index("Accuracy"):]
    figures, pages = re.findall(r"[\d.]+ %|[\d.]+ times", accuracy), re.findall(r"docs/[\w/]+\.md", accuracy)
    docs = "".join((ROOT / page).read_text() for page in pages)
    assert figures == ["1 %", "20 %", "23 %", "1.8 %", "4.6 %", "1.14 times", "0.5 %", "1.8 %", "0.9 %", "1.8 %",
                       "5.1 %", "0.3 %", "1.2 %", "2.5 %"]
    assert all(figure in docs for figure in figures)


@given(st.floats(1e6, 1e12), st.floats(1e-7, 1e-2), st.integers(2, 512), st.floats(1e-4, 1.0))
def test_the_verdict_follows_the_table(bandwidth, latency, size, density):
    network = advise.Network(latency, bandwidth)
    dense, _, *ahead = advise.predict(N, size, OkTopk(density=density), network, *SECONDS)
    _, _, verdict, *_ = advise.report(N, size, OkTopk(density=density), network, *SECONDS).split("\n\n")
    best = min(p.seconds for p in ahead)
    assert verdict.startswith("Dense wins") == (best >= dense.seconds)
    assert all(f" {1e3 * seconds:.2f} ms" in verdict for seconds in (dense.seconds, best))


@pytest.mark.parametrize(("text", "value"), [("10gbit", 1e10), ("940mbit/s", 9.4e8), ("1e9bit", 1e9), ("1 Gbps", 1e9),
                                             ("2.5Gbit", 2.5e9), ("25GBIT", 2.5e10), ("400Gb/s", 4e11)])
def test_bandwidths(text, value):
    assert advise.parse_bandwidth(text) == value


@pytest.mark.parametrize(("text", "value"), [("50us", 50e-6), ("0.1ms", 1e-4), ("5e-5s", 5e-5), ("900ns", 9e-7)])
def test_latencies(text, value):
    assert advise.parse_latency(text) == pytest.approx(value)


NO_BANDWIDTHS = ("", "fast", "0gbit", "-1gbit", "10gb", "nan", "1e999gbit", "10", "1e9", "10g", "25GBps", "25GB/s")


@pytest.mark.parametrize(("parse", "text", "example"), [
    *((advise.parse_bandwidth, text, "10gbit") for text in NO_BANDWIDTHS),
    *((advise.parse_latency, text, "50us") for text in ("", "50", "0us", "-1us", "1m"))])
def test_what_makes_no_sense_is_refused_with_an_example(parse, text, example):
    with pytest.raises(OptionError, match=example):
        parse(text)


def test_selection_is_measured():
    assert 0 < advise.measure_selection(100_000, 0.01) < 10
    assert 0 < advise.measure_blocks(100_000) < 10
    assert 0 < advise.measure_blocks(1) < 10


def test_all_ranks_measure_the_same_network():
    found = run_ranks(3, lambda transport: advise.measure_network(transport, repeats=3), timeout=60)
    assert len(set(found)) == 1
    assert found[0].latency > 0
    assert found[0].bandwidth > 0


def test_a_network_whose_long_messages_take_no_longer_is_refused(monkeypatch):
    monkeypatch.setattr(advise, "_ring_seconds", lambda _, length, _repeats: 0.004 if length < 100 else 0.003)
    with pytest.raises(OptionError, match=r"4 MiB took 3\.00 ms between ranks, and 4 bytes took 4\.00 ms"):
        run_ranks(2, advise.measure_network, timeout=60)


def command(*arguments):
    line = [sys.executable, "-m", "horovod_oktopk", "advise", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_the_command_prints_the_table():
    done = command("--parameters", "200000", "--ranks", "8", "--bandwidth", "1gbit")
    assert done.returncode == 0
    assert re.findall(r"^(\S+) .* MB ", done.stdout, re.MULTILINE) == SCHEMES


@pytest.mark.parametrize(("line", "message"), [
    ("--parameters 0 --ranks 8 --bandwidth 1gbit", "--parameters must be an integer of at least 1"),
    ("--parameters 9 --ranks 1 --bandwidth 1gbit", "--ranks must be an integer of at least 2: one rank sends"),
    ("--parameters 4294967296 --ranks 2 --bandwidth 1gbit", "--parameters must be below 4294967296"),
    *((f"--parameters 9 --ranks 2 --bandwidth 1gbit --density {wrong}", f"--density must be in (0, 1]; got {wrong}")
      for wrong in ("0.0", "2.0", "nan")),
    ("--parameters 9 --ranks 2 --bandwidth 1gbit --global-density 2", "global_density must be in (0, 1]"),
    ("--parameters 9 --ranks 2 --bandwidth 10", "with its unit, such as 10gbit"),
    ("--parameters 9 --ranks 2 --bandwidth 1gbit --latency 5", "with its unit, such as 50us"),
    ("--parameters 9 --ranks 8 --bandwidth 1gbit --ranks-per-host 2", "unrecognized arguments: --ranks-per-host 2"),
    ("--parameters 9 --measure --ranks 0", "--ranks must be an integer of at least 2"),
    ("--parameters 9 --measure --latency 1us", "--measure finds bandwidth and latency"),
    ("--parameters 9 --measure", "--measure needs several ranks: use horovodrun"),
    ("--parameters 9", "give --ranks and --bandwidth")])
def test_the_command_says_what_is_wrong(line, message):
    done = command(*line.split())
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "given", "ranks"), [("mpi", (), 2), ("gloo", ("--ranks", "64"), 64)])
def test_the_network_of_a_job_is_measured_for_its_ranks_or_for_more(backend, given, ranks):
    job = horovodrun(backend, 2, "-m", "horovod_oktopk", "advise", "--parameters", "100000", "--measure", *given,
                     timeout=100)
    assert job.returncode == 0, job.output
    assert job.output.count(f"100,000 parameters, {ranks} ranks, density 0.01, of SameBlocks 0.2; ") == 1
    assert "OkTopk" in job.output


def check(**variables):
    return subprocess.run([sys.executable, "-m", "horovod_oktopk", "check"], env=environment() | variables,
                          capture_output=True, text=True, timeout=240, check=False)


FOUR, FIVE, MPICH = "Open MPI v4.1.6", "Open MPI v5.0.8", "MPICH Version: 5.0.0"


def pretend(monkeypatch, built, theirs=FOUR, mine=None):
    """Have check find a Horovod with these transports and MPI library; `mine` is mpi4py's, if it is another."""
    monkeypatch.setattr(commands, "horovod_says", lambda question: question in built)
    monkeypatch.setattr(commands.shutil, "which", lambda *_, **__: "mpirun")
    probes = {commands.MPI4PY_PROBE: {"mpi4py": mine or theirs},
              commands.MPI_PROBE: {"horovod": theirs, "shared": "0" if mine else "1"}}
    monkeypatch.setattr(commands, "run_probe", lambda program, *_: (probes[program], ""))


@pytest.mark.parametrize(("library", "hint"), [(FOUR, False), (FIVE, True), (MPICH, False)])
def test_the_mpi_library_is_named_and_what_starts_jobs_on_open_mpi_5(library, hint, monkeypatch):
    pretend(monkeypatch, ["mpi_built"], library)
    assert commands.check_mpi().startswith(f"{library}, mpi4py ")
    assert ("start jobs with mpirun: horovodrun needs Open MPI 4" in commands.check_mpi()) == hint


def test_mpich_under_horovod_and_open_mpi_5_under_mpi4py_are_both_named(monkeypatch):
    pretend(monkeypatch, ["mpi_built"], MPICH, FIVE)
    with pytest.raises(commands.MissingError, match=f"mpi4py runs on {FIVE}, Horovod on {MPICH}: put the mpirun"):
        commands.check_mpi()


def test_a_framework_is_found_whatever_its_distribution_is_called(monkeypatch):
    def version(name):  # as with tensorflow-cpu
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert commands.check_integration("torch", "PyTorch", "").startswith("PyTorch 2.")


def no_torchrun():
    raise commands.MissingError("PyTorch is not installed")


@pytest.mark.parametrize(("built", "torchrun", "verdict"), [
    (["mpi_built"], str, "OkTopk can be used here.\n"), ([], no_torchrun, "OkTopk cannot be used here.\n"),
    ([], str, "can be used here with torchrun (horovod_oktopk.distributed), and not with Horovod.\n")])
def test_a_horovod_without_gloo_is_named_and_mpi_serves_or_torchrun(built, torchrun, verdict, monkeypatch, capsys):
    pretend(monkeypatch, built)
    for section, part in (("Integrations", {"PyTorch": str, "TensorFlow": str}), ("Devices", {})):
        monkeypatch.setitem(commands.SECTIONS, section, part)
    monkeypatch.setitem(commands.SECTIONS["Transports"], "torchrun", torchrun)
    assert commands.check() == ("cannot" in verdict)
    printed = capsys.readouterr().out
    assert "    [ ] Gloo: Horovod was built without Gloo: run on MPI, or build it with HOROVOD_WITH_GLOO=1" in printed
    assert printed.endswith(verdict)


@pytest.mark.launches
def test_every_part_of_this_environment_is_found():
    done = check()
    assert done.returncode == 0, done.stderr
    for part in ("Kernels: C++", "Horovod: 0.28", "PyTorch: PyTorch 2", "with Keras 3", "MPI: Open MPI", "Gloo: "):
        assert re.search(rf"^    \[X\] .*{re.escape(part)}", f"\n{done.stdout}", re.MULTILINE), (part, done.stdout)
    assert done.stdout.endswith("OkTopk can be used here.\n")


@pytest.mark.slow
@pytest.mark.launches
def test_an_mpi4py_of_another_mpi_than_horovods_is_named_with_both_and_gloo_serves():
    done = check(MPI4PY_MPIABI="mpich")  # mpi4py's wheel has a part for MPICH, which is not in this environment
    assert re.search(r"\[ \] MPI: mpi4py runs on (none that loads|MPICH).*, Horovod on Open MPI v4.*: put the mpirun",
                     done.stdout), done.stdout
    assert done.stdout.endswith("OkTopk can be used here.\n")
    assert done.returncode == 0
