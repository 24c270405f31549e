"""Tasks, methods, and the studies in which `convergence` sets methods side by side at one task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.output import BLUE, GREEN, ORANGE, RED, VIOLET

BLACK = "#222222"
Options = Mapping[str, Any]
"""Options of a program, by name, without their dashes; True: the name alone."""


@dataclass(frozen=True)
class Task:
    """One program's training. batch: of all ranks together."""

    title: str
    program: str
    metric: str
    label: str
    batch: int
    options: Options = field(default_factory=dict)

    @property
    def unit(self) -> float:
        """Factor of the metric in a plot."""
        return 100 if self.metric == "accuracy" else 1

    def shown(self, value: float) -> str:
        """Return the metric, in the table's unit."""
        return f"{value:.2%}" if self.metric == "accuracy" else f"{value:.4f}"

    def difference(self, value: float, dense: float) -> str:
        """Return the difference to dense: points of accuracy, or percent of the loss."""
        if self.metric == "accuracy":
            return f"{100 * (value - dense):+.2f} points"
        return f"{value / dense - 1:+.1%}"


@dataclass(frozen=True)
class Method:
    """One way to train.

    ranks: None for the study's. rate_of: the method whose learning rate it takes; None: its best one.
    """

    title: str
    color: str
    options: Options
    ranks: int | None = None
    rate_of: str | None = None
    line: str = "-"


@dataclass(frozen=True)
class Study:
    """Methods by their names, of which "dense" is what they are compared with.

    rates: learning rates to choose from, of all ranks together. threads: whether the ranks are threads of one
    process; otherwise it is a Horovod job.
    """

    title: str
    task: Task
    ranks: int
    methods: Mapping[str, Method]
    rates: tuple[float, ...]
    options: Options = field(default_factory=dict)
    threads: bool = True

    def ranks_of(self, name: str) -> int:
        return self.methods[name].ranks or self.ranks

    def options_of(self, name: str, rate: float, seed: int) -> dict[str, Any]:
        """Return the program's options for one run."""
        ranks = self.ranks_of(name)
        options = {**self.task.options, **self.options, **self.methods[name].options, "lr": rate / ranks,
                   "batch-size": self.task.batch // ranks, "seed": seed}
        if options["compression"] == "none":
            options = {key: value for key, value in options.items() if key not in ("density", "density-warmup")}
        return {**options, "threads": ranks} if self.threads else options


LSTM = Task("Characters, LSTM", "pytorch_text", "validation_loss", "validation loss (nats per character)", 64,
            {"epochs": 6})
TRANSFORMER = Task("Characters, transformer", "pytorch_text", "validation_loss",
                   "validation loss (nats per character)", 64, {"epochs": 6, "model": "transformer", "hidden": 60})
GPT = Task("Characters, GPT in a published configuration", "pytorch_text", "validation_loss",
           "validation loss (nats per character)", 12,
           {"epochs": 4, "model": "gpt", "optimizer": "adamw", "beta2": 0.99, "weight-decay": 0.1, "clip": 1.0})
WIDE_GPT = replace(GPT, title="Characters, the GPT 288 wide", batch=16,
                   options={**GPT.options, "epochs": 3, "hidden": 288})
DIGITS = Task("Handwritten digits, convolutional network", "pytorch_digits", "accuracy", "test accuracy (%)", 128)

DENSE = Method("dense", BLACK, {"compression": "none"})
SAME_BATCHES = Method("dense", BLACK, {"compression": "none"}, ranks=4)
"""On as many ranks as there are batches for, it is the same training, to rounding."""
ON_ONE_RANK = replace(DENSE, ranks=1)
GRADIENTS = Method("OkTopk", ORANGE, {"compression": "oktopk"})
STEP_AHEAD = Method("StepAhead(OkTopk)", BLUE, {"compression": "oktopk", "step-ahead": True})
SAME_BLOCKS = Method("StepAhead(SameBlocks)", GREEN,
                     {"compression": "sameblocks", "step-ahead": True, "density": 0.2}, rate_of="step-ahead")


def step_ahead(title: str, color: str, line: str = "-", **options: Any) -> Method:
    """Return StepAhead(OkTopk), with other options."""
    return Method(f"StepAhead, {title}", color, {**STEP_AHEAD.options, **options}, rate_of="step-ahead", line=line)


def same_blocks(title: str, line: str, **options: Any) -> Method:
    """Return StepAhead(SameBlocks), with other options."""
    return replace(SAME_BLOCKS, title=f"StepAhead(SameBlocks), {title}", line=line,
                   options={**SAME_BLOCKS.options, **options})


AT_ONCE = same_blocks("without overlap", "-.", **{"no-overlap": True})
ALL_AT_ONCE = same_blocks("all, without overlap", "-.", **{"no-overlap": True, "density": 1.0})
TWO_PASSES = same_blocks("two passes", ":", passes=2)
ALL_IN_TWO_PASSES = same_blocks("all, two passes", ":", passes=2, density=1.0)
MORE_BLOCKS = {"half": same_blocks("half", "--", density=0.5), "all": same_blocks("all", ":", density=1.0)}


MAIN = {"gradients": GRADIENTS, "step-ahead": STEP_AHEAD}
SCHEMES = {"dense": DENSE, "gradients": GRADIENTS, **{
    name.lower(): Method(name, color, {"compression": name.lower()}, line=line) for name, color, line in (
        ("TopkA", BLUE, "-"), ("TopkDSA", GREEN, "--"), ("GTopk", RED, "-"), ("GaussianK", VIOLET, "-"))}}

WITHOUT_GAIN = step_ahead("gain=None", VIOLET, gain="none")


def longer(epochs: int, of: Task, **methods: Method) -> dict[str, Method]:
    """Return methods in longer runs, with their schedules stretched to them, by names that end in "-longer"."""
    times = f"{epochs / int(of.options['epochs']):.3g} times the steps"
    return {f"{name.replace('_', '-')}-longer": replace(
        method, title=f"{method.title}, {times}", options={**method.options, "epochs": epochs}, rate_of="dense",
        line="--") for name, method in methods.items()}


TRANSFORMER_RATES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
SGD_RATES, ADAM_RATES = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0), (0.02, 0.04, 0.08, 0.16, 0.32)
ONE_PERCENT = {"density": 0.01}

STUDIES = {
    **{f"lstm-{ranks}": Study("SGD with momentum", LSTM, ranks, {"dense": SAME_BATCHES, **MAIN}, SGD_RATES,
                              ONE_PERCENT) for ranks in (4, 8)},
    "lstm-adamw": Study("AdamW", LSTM, 4, {"dense": SAME_BATCHES, **MAIN}, ADAM_RATES,
                        {**ONE_PERCENT, "optimizer": "adamw"}),
    "transformer-adamw": Study("AdamW", TRANSFORMER, 4, {"dense": SAME_BATCHES, **MAIN},
                               TRANSFORMER_RATES, {**ONE_PERCENT, "optimizer": "adamw", "epochs": 12}),
    "own-gpt": Study("dense's own settings", GPT, 4, {
        "dense": ON_ONE_RANK, "step-ahead": STEP_AHEAD, "same-blocks": SAME_BLOCKS, **MORE_BLOCKS,
        "all-at-once": ALL_AT_ONCE, "all-in-two-passes": ALL_IN_TWO_PASSES, "no-gain": WITHOUT_GAIN,
        **longer(5, GPT, step_ahead=STEP_AHEAD, same_blocks=SAME_BLOCKS, dense=ON_ONE_RANK)}, (0.001,), ONE_PERCENT),
    "own-gpt-wide": Study("dense's own settings", WIDE_GPT, 8, {
        "dense": ON_ONE_RANK, **longer(
            4, WIDE_GPT, step_ahead=STEP_AHEAD, same_blocks=SAME_BLOCKS, at_once=AT_ONCE, dense=ON_ONE_RANK)},
        (0.001,), ONE_PERCENT),
    **{f"own-transformer-{ranks}": Study("AdamW, dense's own settings", TRANSFORMER, ranks, {
        "dense": SAME_BATCHES, "step-ahead": STEP_AHEAD, "same-blocks": SAME_BLOCKS, "at-once": AT_ONCE,
        "all-at-once": ALL_AT_ONCE, **({"no-gain": WITHOUT_GAIN} if ranks == 4 else {}),
        **(MORE_BLOCKS if ranks == 16 else {})},
        (0.02,), {**ONE_PERCENT, "optimizer": "adamw", "epochs": 12}) for ranks in (4, 8, 16)},
    **{f"own-lstm-{ranks}": Study("SGD with momentum, dense's own settings", LSTM, ranks, {
        "dense": SAME_BATCHES, "step-ahead": STEP_AHEAD, "same-blocks": SAME_BLOCKS, "at-once": AT_ONCE,
        "two-passes": TWO_PASSES, "all-at-once": ALL_AT_ONCE}, (8.0,), ONE_PERCENT) for ranks in (4, 8, 16)},
    "digits-1": Study("density 1 %", DIGITS, 4, {"dense": DENSE, **MAIN}, (0.05, 0.1), ONE_PERCENT),
    "schemes-digits": Study("every scheme", DIGITS, 4, SCHEMES, (0.05,), {"density": 0.02}, threads=False),
    "schemes-lstm": Study("every scheme, density warm-up", LSTM, 2, SCHEMES, (2.0,),
                          {"density": 0.02, "density-warmup": 3}, threads=False),
}
