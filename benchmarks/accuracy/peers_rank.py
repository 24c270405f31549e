"""One rank of peers.py: trainings by several methods, in turns; one a line of arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import launch
from benchmarks.accuracy import pytorch_digits, pytorch_text, torchrun_ranks
from benchmarks.accuracy.peers_ranks import PeerRanks
from benchmarks.accuracy.pytorch_training import Setup, make_pytorch_parser, train

TASKS: dict[str, tuple[Callable[..., Setup], Callable[[], Any], list[str]]] = {
    "cnn": (pytorch_digits.make,
            lambda: make_pytorch_parser(None, epochs=20, batch_size=32, lr=0.0125), []),
    "gpt": (pytorch_text.make, pytorch_text.make_text_parser,
            ["--model", "gpt", "--optimizer", "adamw", "--beta2", "0.99", "--weight-decay", "0.1"])}
"""By name: the setup, the parser, and arguments."""


def measure(task: str, runs: Sequence[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    """Train once for each peer and arguments; return what each has reached."""
    torchrun_ranks.start()
    torch.set_num_threads(1)
    make, parser, common = TASKS[task]
    found = []
    for peer, line in runs:
        arguments = parser().parse_args([*common, *line])
        ranks = PeerRanks(peer)
        torch.manual_seed(arguments.seed)
        setup = make(ranks, arguments)
        setup = replace(setup, model=ranks.wrapped(setup.model))
        torch.manual_seed(arguments.seed * ranks.size() + ranks.rank())
        arguments.compression = peer[:9]  # the progress bar's title
        results = train(setup, ranks, arguments)
        found.append({"metric": results[setup.task.metric], "bytes_per_step": results["bytes_per_step"]})
        print(f"{task}, {peer}: {found[-1]}", file=sys.stderr)
    return found


if __name__ == "__main__":
    launch.run_rank(measure)
