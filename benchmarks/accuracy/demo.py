"""Training on handwritten digits with 4 ranks: dense and OkTopk, and StepAhead in PyTorch.

    make demo
    make demo-torchrun
    make demo-tensorflow

Exits with status 1 if the test accuracy of one of them is more than one point below that of dense training.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import launch
from benchmarks.output import make_table

METHODS = {"dense": ["--compression", "none"], "OkTopk": ["--compression", "oktopk"]}
STEP_AHEAD = {"StepAhead(OkTopk)": ["--compression", "oktopk", "--step-ahead"]}
TRAINING = {"pytorch": ("PyTorch", "benchmarks.accuracy.pytorch_digits", {**METHODS, **STEP_AHEAD}),
            "tensorflow": ("Keras", "benchmarks.accuracy.keras_digits", METHODS)}
"""The framework's name, the program that trains, and its arguments by method."""
TAG = re.compile(rb"\[\d+,\d+\]<std(?:out|err)>:")
"""mpirun's mark before the output of each rank; it would tear the progress bar apart."""
LONGEST_TAG = 24
NOTICE = re.compile(rb"(?:WARNING: All log messages before absl|E0000 )[^\n]*\n")
"""Notices that TensorFlow prints in every process before it can be told to be quiet."""
EPOCHS = 20
"""Epochs of each training, by every method; a newcomer waits for all of them."""
TOLERATED = 0.01
"""Accuracy that may be lost."""


def parse_arguments(line: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=TRAINING, default="pytorch")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--launcher", choices=["mpi", "gloo", "torchrun"], default="mpi",
                        help="horovodrun over MPI or Gloo; or torchrun, without Horovod")
    arguments = parser.parse_args(line)
    if arguments.launcher == "torchrun" and arguments.framework != "pytorch":
        parser.error("torchrun starts PyTorch: leave --framework out")
    return arguments


def run_passing_output(command: list[str]) -> int:
    """Run the command and print its output as it comes, without marks and notices. Return its exit status."""
    with subprocess.Popen(command, env=launch.environment(), cwd=launch.ROOT, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        held = b""
        while chunk := os.read(process.stdout.fileno(), 1 << 16):
            text = NOTICE.sub(b"", TAG.sub(b"", held + chunk))
            # What may be the first part of a mark, or of a notice, waits for the rest.
            cut = text.rfind(b"[", max(0, len(text) - LONGEST_TAG))
            line = text.rfind(b"\n") + 1
            if text[line:line + 1] in (b"E", b"W"):
                cut = line
            text, held = (text, b"") if cut < 0 else (text[:cut], text[cut:])
            sys.stderr.buffer.write(text)
            sys.stderr.buffer.flush()
        sys.stderr.buffer.write(NOTICE.sub(b"", TAG.sub(b"", held)))
        sys.stderr.buffer.flush()
    return process.returncode


def train(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Train by all methods, in turns in one job; return their results. Exit with its status if it fails."""
    _, program, methods = TRAINING[arguments.framework]
    results = {name: folder / f"results{number}.json" for number, name in enumerate(methods)}
    lines = folder / "lines.json"
    lines.write_text(json.dumps([
        [*given, "--epochs", str(EPOCHS), "--density", str(arguments.density), "--seed", str(arguments.seed),
         "--json", str(results[name])]
        for name, given in methods.items()]))
    launcher = (launch.torchrun(arguments.ranks) if arguments.launcher == "torchrun"
                else launch.horovodrun(arguments.ranks, arguments.launcher))
    command = [*launcher, sys.executable, "-m", "benchmarks.accuracy.in_turns", program, str(lines)]
    status = run_passing_output(command)
    if status or not all(path.exists() for path in results.values()):
        sys.exit(f"demo: a training failed (status {status}): {' '.join(command)}")
    return {name: json.loads(path.read_text()) for name, path in results.items()}


def show(framework: str, results: dict[str, dict[str, Any]], console: Console) -> None:
    dense, sparse = results["dense"], results["OkTopk"]
    table = make_table(f"Handwritten digits, {framework}, {dense['ranks']} ranks, "
                       f"{dense['parameters']:,} parameters, density {sparse['density']:.1%}", ["method"],
                       ["test accuracy", "bytes per rank and step", "seconds per step"])
    for name, outcome in results.items():
        table.add_row(name, f"{outcome['accuracy']:.2%}", f"{outcome['bytes_per_step']:,.0f}",
                      f"{outcome['seconds_per_step']:.4f}")
    console.print(table)
    fewer = dense["bytes_per_step"] / sparse["bytes_per_step"]
    console.print(f"OkTopk sent {fewer:.1f} times fewer bytes (counted as sent; the dense ones are computed, "
                  "2n(P-1)/P words). All ranks share one machine, with no network between them, so the seconds show "
                  "what OkTopk costs here, and nothing of what it saves on a slow network.")


def main(line: list[str] | None = None) -> None:
    arguments = parse_arguments(line)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        results = train(arguments, Path(folder))
    show(TRAINING[arguments.framework][0], results, console)
    lost = {name: results["dense"]["accuracy"] - outcome["accuracy"] for name, outcome in results.items()}
    for name, points in lost.items():
        if points > TOLERATED:
            console.print(f"{name} lost {100 * points:.2f} points of accuracy; at most {100 * TOLERATED:g} is "
                          "expected.")
    if max(lost.values()) > TOLERATED:
        sys.exit(1)


if __name__ == "__main__":
    main()
