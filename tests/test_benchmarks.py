"""The benchmarks of one process run, and what they write has the properties that the algorithms promise."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.accuracy import convergence, pytorch_text
from benchmarks.cluster import time_to_loss
from benchmarks.faults.jobs import Ended, faults_of
from benchmarks.faults.plans import Plan
from benchmarks.paper import age, data_parallel, figures, fill_in, rounds, selected, stragglers, xi
from benchmarks.paper.simulated_links import Crossing, LinkLog, LinkTransport, Way
from horovod_oktopk import OkTopk
from horovod_oktopk.phases.agreement import FEW_RANKS
from horovod_oktopk.phases.volume import oktopk_bound
from horovod_oktopk.selection.sketches import sketch_shape
from horovod_oktopk.transport.base import alltoall_rounds
from horovod_oktopk.vectors.wire import WireCodec
from tests.launch import ROOT, environment
from tests.support.threads import run_ranks


def outcome(program: str, folder: Path, *arguments: str) -> dict[str, Any]:
    outputs = ("--json", str(folder / "out.json"), "--plot", str(folder / "out.png"))
    job = subprocess.run([sys.executable, "-m", f"benchmarks.{program}", *arguments, *outputs], cwd=ROOT,
                         env=environment(), text=True, capture_output=True, timeout=120, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    assert (folder / "out.png").stat().st_size > 0
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def test_the_cost_of_a_step_on_the_host_and_on_a_device(tmp_path: Path) -> None:
    host = outcome("local.step", tmp_path, "--n", "50000", "--steps", "2", "--warm-up", "1", "--every", "1")
    assert set(host["steps"]) >= {"NumPy", "StepAhead"}
    device = outcome("local.device", tmp_path, "--device", "cpu", "--n", "5000", "50000", "--steps", "2",
                     "--warm-up", "1")
    assert [size["k"] for size in device["sizes"]] == [50, 500]
    for phases in (*host["steps"].values(), *(size["phases"] for size in device["sizes"])):
        parts = sum(phases[name]["mean"] for name in ("accumulate", "select", "reduce", "write-back"))
        assert 0 < parts == pytest.approx(phases["step"]["mean"])


MOST_ROUNDS = 8
"""Rounds of counting until the regions' cuts are right."""


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("simulation")
    entry = {"scheme": "OkTopk", "ranks": 4, "seconds": 0.1, "bytes_sent": 5000, "n": 50000, "density": 0.02}
    (folder / "measured.json").write_text(json.dumps([
        {**entry, "rate": "1gbit"}, {**entry, "rate": "100mbit"}, {**entry, "rate": "1gbit", "n": 3},
        {**entry, "scheme": "Horovod dense", "rate": "1gbit", "density": None}]))
    return outcome("paper.simulation", folder, "--parameters", "50000", "--density", "0.02", "--ranks", "2", "3", "8",
                   "72", "--measured", str(folder / "measured.json"))


def results(simulation: dict[str, Any], scheme: str) -> list[dict[str, Any]]:
    return [r for r in simulation["results"] if r["scheme"] == scheme]


def test_oktopk_keeps_its_bound_on_every_rank(simulation: dict[str, Any]) -> None:
    found = results(simulation, "OkTopk")
    assert [(r["ranks"], r["step"]) for r in found] == [(size, step) for size in (2, 3, 8, 72) for step in (1, 2)]
    for r in found:
        assert 0.5 * simulation["k"] < r["payload_mean"] <= r["payload_most"] <= oktopk_bound(simulation["k"],
                                                                                              r["ranks"])


def test_control_messages_are_those_of_the_table_in_the_documentation(simulation: dict[str, Any]) -> None:
    for r in results(simulation, "OkTopk"):
        size, first = r["ranks"], r["step"] == 1
        blocks = sum(len(moved) for each in alltoall_rounds(size) for _, moved in each)
        called, counts = (4 + size + size % 2, size + size % 2) if size <= FEW_RANKS else (2, 2)
        agree = (called + first * counts) * (size - 1 if size <= FEW_RANKS else blocks) + first * 66 * (size - 1)
        entries, step = sketch_shape(simulation["k"], size)
        between = size * (1 + 4 * step)  # at most, of all ranks
        counting = 4 * (size - 1) * MOST_ROUNDS if first else 0
        radix = 4 * (4 * 256 * (size - 1) // size) + 4 * (size - 1)
        told = r["control_most"] - agree - (size - 1) * entries
        assert -8 <= told <= between + counting or radix - 8 <= told <= radix + counting + 8, (r["ranks"], r["step"])


def test_the_predicted_seconds_follow_from_messages_and_bytes(simulation: dict[str, Any]) -> None:
    (r,) = (r for r in results(simulation, "TopkA") if r["ranks"] == 8)
    size = WireCodec(np.dtype("float32")).size(simulation["k"], 50000)
    assert r["seconds"] == pytest.approx(2 * 3 * (50e-6 + 2e-6) + 8 * (size * 7 + 6 * 4 * 7) / 1e9, rel=0.01)
    assert r["seconds_ring"] - r["seconds"] == pytest.approx(2 * (7 - 3) * (50e-6 + 2e-6))


def test_messages_that_fly_at_once_have_one_latency(simulation: dict[str, Any]) -> None:
    """Messages of 71 others: eight batches of nine, and what each costs the processor."""
    (r,) = (r for r in results(simulation, "OkTopk") if (r["ranks"], r["step"]) == (72, 2))
    split = r["phases"]["split_and_reduce"]
    assert (split["rounds"], split["messages"]) == (8, 71)
    assert split["seconds"] == pytest.approx(8 * 50e-6 + 71 * 2e-6 + 8 * split["bytes"] / 1e9)


@pytest.mark.parametrize(("call", "tree", "ring"), [
    (lambda transport: transport.allgather(np.zeros(2, np.int64)), (3, 3), (5, 5)),
    (lambda transport: transport.allreduce(np.zeros(6, np.int64)), (6, 6), (10, 10)),
    (lambda transport: transport.alltoall(np.zeros((6, 1), np.int64)), (1, 5), (1, 5)),
    (lambda transport: list(transport.send_and_receive({(transport.rank + 1) % 6: np.zeros(4, np.uint8)},
                                               {(transport.rank - 1) % 6: 4})), (1, 1), (1, 1))])
def test_rounds_and_messages_are_noted_as_of_trees_and_of_rings(call: Any, tree: tuple[int, int],
                                                                ring: tuple[int, int]) -> None:
    def program(inner: Any) -> Any:
        transport = LinkTransport(inner, LinkLog())
        call(transport)
        (found,) = transport.log.crossings.values()
        return found

    assert run_ranks(6, program) == [Crossing(Way(*tree), Way(*ring))] * 6


def test_what_was_left_out_is_said(simulation: dict[str, Any]) -> None:
    assert simulation["left_out"] == ["TopkDSA on 72 ranks", "TopkA on 72 ranks",
                                      "2 measured points, of another n, density or rate"]
    assert [(m["scheme"], m["ranks"]) for m in simulation["measured"]] == [("OkTopk", 4), ("dense", 4)]


BAD_INPUT = [
    ("paper.simulation", "--ranks 4 1", "--ranks must be from 2 to 1024; got 1"),
    ("paper.simulation", "--density 0.5", "--density must be in (0, 0.25]; got 0.5"),
    ("paper.simulation", "--bandwidth fast", "with its unit, such as 10gbit, 940mbit/s or 25Gbps; got 'fast'"),
    ("paper.simulation", "--measured README.md", "cannot use --measured README.md"),
    ("paper.simulation", "--schemes Topk", "invalid choice: 'Topk'"),
    ("cluster.compare", "--hosts 1", "--hosts must be from 2 to 64"),
    ("cluster.compare", "--ranks-per-host 0", "--ranks-per-host must be from 1 to 64; got 0"),
    ("cluster.compare", "--rate fast", "--rate must be such as 100mbit"),
    ("cluster.compare", "--parameters 1000000000000", "GiB are free"),
    ("cluster.compare", "--density 0", "--density must be in (0, 1]; got 0.0"),
    ("cluster.compare", "--gradients nowhere.npy", "there is no file nowhere.npy"),
    ("cluster.sizes", "--sizes 1000000000000", "GiB are free"),
    ("accuracy.convergence", "--studies words", "invalid choice: 'words'"),
    pytest.param("local.device", "", "PyTorch sees no CUDA device here; --device cpu",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here"))]


@pytest.mark.parametrize(("program", "line", "message"), BAD_INPUT)
def test_bad_input_is_told_before_anything_is_measured(program: str, line: str, message: str, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"benchmarks.{program}")
    with pytest.raises(SystemExit) as told:
        module.main([*line.split(), "--json", str(tmp_path / "out.json")])
    assert message in f"{told.value} {capsys.readouterr().err}"
    assert told.value.code != 0
    assert not (tmp_path / "out.json").exists()


TINY = ("--threads", "2", "--epochs", "2", "--batch-size", "128", "--hidden", "6", "--sequence", "32", "--lr", "0.5")


def train_text(folder: Path, *arguments: str) -> dict[str, Any]:
    pytorch_text.main([*TINY, *arguments, "--json", str(folder / "out.json")])
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


@pytest.mark.parametrize("method", ["none", "oktopk --density 0.05", "oktopk --density 0.05 --step-ahead",
                                    "topka --step-ahead --no-overlap --density-warmup 1",
                                    "oktopk --model transformer --optimizer adamw --lr 0.01 --step-ahead --passes 2"])
def test_ranks_that_are_threads_learn_the_text_and_count_their_bytes(method: str, tmp_path: Path) -> None:
    found = train_text(tmp_path, "--compression", *method.split())
    first, second = found["history"]
    assert second["validation_loss"] < first["validation_loss"] < 4.63  # that of guessing among 103 characters
    assert found["ranks"] == 2
    assert 0 < first["bytes"] < second["bytes"]
    assert (found["bytes_per_step"] > 4 * found["parameters"]) == (method == "none")


def test_step_ahead_with_everything_sent_is_dense_training(tmp_path: Path) -> None:
    dense = train_text(tmp_path, "--compression", "none")
    ahead = train_text(tmp_path, "--compression", "oktopk", "--density", "1", "--value-dtype", "none", "--step-ahead",
                       "--no-overlap", "--ahead", "1")
    assert ahead["validation_loss"] == pytest.approx(dense["validation_loss"], rel=1e-4)


def test_a_study_tries_the_rates_with_the_first_seed_and_repeats_no_run(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def train(_command: list[str], options: dict[str, Any], _timeout: float) -> dict[str, Any]:
        made.append((options["compression"], options.get("step-ahead"), options["lr"], options["seed"]))
        value = abs(options["lr"] - (2.0 if options["compression"] == "none" else 1.0)) + 1
        entry = {"epoch": 1, "validation_loss": value, "bytes": 1000.0}
        return {"validation_loss": value, "parameters": 7, "bytes_per_step": 10.0, "history": [entry, entry]}

    monkeypatch.setattr(convergence, "train", train)
    line = ["--studies", "lstm-4", "--seeds", "1", "2", "--json", str(tmp_path / "out.json"), "--plot",
            str(tmp_path / "out.png")]
    convergence.main(line)
    assert {rate for name, _, rate, seed in made if (name, seed) == ("none", 2)} == {2.0}
    assert {rate for name, _, rate, seed in made if (name, seed) == ("oktopk", 2)} == {1.0}
    assert {rate for name, _, rate, seed in made if (name, seed) == ("none", 1)} == {1.0, 1.5, 2.0, 3.0}
    assert {rate for name, ahead, rate, seed in made if (name, ahead, seed) == ("oktopk", True, 1)} == {0.5, 1.0, 1.5}
    assert (tmp_path / "out_lstm-4.png").stat().st_size > 0
    count = len(made)
    convergence.main(line)
    assert len(made) == count
    convergence.main(["--studies", "digits-1", "--no-training", *line[2:]])  # of which there are none
    assert len(made) == count
    assert not (tmp_path / "out_digits-1.png").exists()


@pytest.mark.slow
def test_jobs_in_which_a_rank_goes_wrong_end_as_promised(tmp_path: Path) -> None:
    found: Any = outcome("faults.campaign", tmp_path, "--jobs", "2", "--programs", "torch", "--faults", "raise")
    assert [row["fault"] for row in found] == ["raise"] * 2
    assert [row["wrong"] for row in found] == [[]] * 2, found


def test_a_job_that_ends_otherwise_is_told() -> None:
    plan = Plan("torch", "gradients", "mpi", 2, "raise", rank=1)
    told = {0: {"error": "TransportError: rank 1 has ended with ValueError"}}
    well = Ended(plan, in_time=True, returncode=1, ranks=told, crashes=[], left_over=0, happened=True, seconds=1.0,
                 output="")
    assert faults_of(well, None) == []
    blames = {0: {"error": "TransportError: rank 0 has come to the end of its program"}}
    for change in ({"in_time": False}, {"returncode": 0}, {"crashes": [0]}, {"left_over": 1}, {"happened": False},
                   {"ranks": blames}):
        assert len(faults_of(replace(well, **change), None)) == 1, change
    alike = {rank: {"digest": "a", "finite": True, "saved": None} for rank in range(2)}
    paused = replace(well, plan=replace(plan, fault="pause"), returncode=0, ranks=alike)
    assert faults_of(paused, paused) == []
    for change in ({"returncode": 1}, {"ranks": {**alike, 1: {**alike[1], "digest": "b"}}},
                   {"ranks": {**alike, 1: {**alike[1], "finite": False}}}, {"ranks": {0: alike[0]}}):
        assert faults_of(replace(paused, **change), paused), change
    other = {rank: {**each, "digest": "c"} for rank, each in alike.items()}
    assert faults_of(paused, replace(paused, ranks=other))


def test_dense_that_trained_on_one_rank_is_shown_with_the_bytes_of_the_studys_ranks() -> None:
    study = convergence.STUDIES["own-gpt"]
    dense = {"ranks": 1, "parameters": 1000, "bytes_per_step": 0.0, "options": {"compression": "none"},
             "history": [{"epoch": 1, "bytes": 0.0}, {"epoch": 2, "bytes": 0.0}]}
    sparse = {"ranks": 4, "parameters": 1000, "bytes_per_step": 10.0, "options": {"compression": "oktopk"},
              "history": [{"epoch": 1, "bytes": 50.0}, {"epoch": 2, "bytes": 100.0}]}
    found = {"dense": convergence.Tuned(1.0, [dense]), "step-ahead": convergence.Tuned(1.0, [sparse])}
    steps = convergence.steps_of_an_epoch(found)
    assert steps == 5
    assert convergence.bytes_per_step(study, dense) == 4 * 2 * 1000 * 3 / 4
    assert [entry["bytes"] for entry in convergence.history_of(study, dense, steps)] == [30000, 60000]
    assert convergence.history_of(study, sparse, steps) == sparse["history"]


def test_a_loss_is_reached_between_two_evaluations_by_the_training_that_is_the_soonest() -> None:
    curve = [(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]
    assert [time_to_loss.epochs_to(goal, curve) for goal in (3.5, 2.5, 2.0, 1.25, 0.9)] == [1.0, 1.5, 2.0, 2.75, None]
    method = time_to_loss.METHODS["StepAhead(OkTopk), 1 %"]
    curves = {"dense": [curve, curve], "step-ahead": [curve, curve[:2]],
              "step-ahead-longer": [[(1.0, 3.0), (5.0, 1.0)]] * 2}
    assert time_to_loss.reached(method, 1.0, curves) == [5.0, 5.0], "the shorter one gets there with one seed alone"
    assert time_to_loss.reached(method, 2.0, curves) == [2.0, 2.0]
    assert time_to_loss.reached(method, 0.5, curves) is None


def quietly(items: Any, _text: str) -> Any:
    return items


@pytest.mark.launches
def test_rounds_of_ranks_that_come_one_after_the_other(tmp_path: Path) -> None:
    found = rounds.measure(quietly, ranks=3, sizes=(16,), skew=0.01, iterations=4)
    whole, majority, solo = found["results"]
    assert whole["active"] == 3
    assert all(1 <= r["active"] <= 3 and 1 <= r["rounds"] <= 8 and r["seconds"] > 0 for r in (majority, solo))
    assert [row[:2] for row in rounds.rows(found)[1:]] == [["16", kind] for kind in rounds.KINDS]
    rounds.plot(found, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 0


@pytest.mark.launches
def test_training_with_stragglers_is_no_faster_than_its_delays(tmp_path: Path) -> None:
    found = stragglers.measure(quietly, ("OkTopk",), ranks=2, seeds=(1, 2), steps=40, skew=0.02, density=0.05)
    runs = [run for r in found["results"] for run in r["runs"]]
    assert len(runs) == 6
    assert all(0.3 < run["accuracy"] <= 1 for run in runs)
    most = {"synchronous": 1 / 0.06, "solo": 1 / 0.05, "majority": 1 / 0.05}  # delays are of 40 and 60 ms, in turn
    assert all(run["steps_per_second"] < 1.1 * most[r["policy"]] for r in found["results"] for run in r["runs"])
    assert [row[:2] for row in stragglers.rows(found)[1:]] == [["OkTopk", policy] for policy in stragglers.POLICIES]
    stragglers.plot(found, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 0


SMALL = {"ranks": 4, "steps": 6, "hidden": 8}


def test_xi_is_zero_if_all_is_sent_and_lower_at_a_higher_density() -> None:
    found = xi.measure(quietly, **SMALL)["xi"]
    assert set(found) == {"1 %", "2 %"}
    assert all(0 < high < low for low, high in zip(found["1 %"], found["2 %"], strict=True))
    everything = next(data_parallel.train(OkTopk(density=1.0), 4, 8, range(1)))
    assert xi.of_step(everything) < 1e-6


def test_oktopk_selects_k_and_the_papers_rule_more_while_residuals_fill() -> None:
    found = selected.measure(quietly, **SMALL)
    for rule in ("OkTopk", "OkTopk, reuse"):
        assert found["local"][rule] == [1.0] * 6
    assert found["global"]["OkTopk"] == [1.0] * 6
    assert all(0.75 <= share <= 1.25 for share in found["global"]["OkTopk, reuse"])
    assert all(0.75 < share <= 1 for share in found["local"]["GaussianK"])
    first, *others = found["local"]["the paper's reuse"]
    assert first == 1 < min(others)


def test_a_threshold_lets_more_pass_the_older_it_is() -> None:
    found = age.measure(quietly, **SMALL)
    assert list(found["local"]) == list(found["global"]) == ["1", "2", "4"]
    assert [len(values) for values in found["local"].values()] == [5, 4, 2]
    assert 1 < found["local"]["1"][-1] < found["local"]["2"][-1] < found["local"]["4"][-1]


def test_the_fill_in_lies_between_one_and_the_number_of_ranks() -> None:
    found = fill_in.measure(quietly, **SMALL)["fill_in"]
    assert len(found) == 4
    for by_ranks in found.values():
        assert 1 < by_ranks["2"] < 2
        assert by_ranks["2"] < by_ranks["4"] < 4


def test_parts_are_tabled_and_drawn_and_leave_what_others_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    small = {"xi": SMALL, "selected": SMALL, "age": SMALL, "fill_in": SMALL, "convergence": {
        "seeds": 1, "rates": (1.0,), "lengths": (1,), "small": "--hidden 6 --sequence 64 --batch-size 128"}}
    assert set(small) < set(figures.PARTS), "the others start jobs, and have tests of their own"
    for name, options in small.items():
        part: Any = figures.PARTS[name]
        monkeypatch.setitem(figures.PARTS, name, SimpleNamespace(
            measure=partial(part.measure, **options), rows=part.rows, plot=part.plot))
    figures.main(["xi", "convergence", "--output", str(tmp_path)])
    figures.main(["selected", "age", "fill_in", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "data" / "paper.json").read_text())
    assert set(found) == set(small)
    assert all(loss[0] < 4.63 for by_epochs in found["convergence"]["losses"].values() for loss in by_epochs.values())
    assert {path.name for path in (tmp_path / "images").iterdir()} == {f"paper_{name}.png" for name in small}
    capsys.readouterr()
    figures.main(["xi", "--show", "--output", str(tmp_path)])
    assert capsys.readouterr().out == f"\nxi\n\n{figures.markdown(xi.rows(found['xi']))}\n"
    with pytest.raises(SystemExit):
        figures.main(["eta", "--output", str(tmp_path)])
    assert "got eta" in capsys.readouterr().err
