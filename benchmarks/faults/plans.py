"""Plans of faults: which rank does what, when, and in which program."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product

FAULTS = {
    "none": "nothing", "kill": "is killed (SIGKILL)", "vanish": "ends without a word (os._exit)",
    "raise": "raises an exception", "exit": "calls sys.exit(3)", "fewer": "has fewer steps",
    "pause": "stands still for a while (SIGSTOP, SIGCONT)", "freeze": "stands still for ever (SIGSTOP)",
    "disk": "has a full disk while it saves the state", "nan": "computes NaN in one step",
    "options": "has another density", "destroy": "calls dist.destroy_process_group in the middle"}
"""By name: what one rank does."""

PROGRAMS = {"torch": ("gradients", "step-ahead", "partial"), "keras3": ("gradients", "step-ahead", "partial"),
            "tf-keras": ("gradients", "step-ahead"), "tape": ("gradients",)}
"""By name: the modes that it has. torch: a loop; keras3, tf-keras: model.fit; tape: a tf.function of TensorFlow."""

NETWORKS = ("mpi", "gloo", "torchrun")
"""Horovod over MPI or Gloo; or torch.distributed."""

EPOCHS, STEPS = 2, 6
STALL_SHUTDOWN = 15
"""Seconds after which a job ends where a rank stands still for ever: Horovod's, or torch.distributed's timeout."""
PAUSE = 3.0


@dataclass(frozen=True)
class Plan:
    """One job.

    rank: the one that goes wrong. step: when, counted from 0 over all epochs. delay: seconds after the step's
    beginning, for what comes from outside. room: bytes of a file that the full disk takes.
    """

    program: str
    mode: str
    network: str
    ranks: int
    fault: str = "none"
    rank: int = 0
    step: int = 0
    delay: float = 0.0
    room: int = 0

    @property
    def without_fault(self) -> Plan:
        """The same program, undisturbed: its bits are what others are compared with."""
        return Plan(self.program, self.mode, self.network, self.ranks)

    @property
    def has_fixed_bits(self) -> bool:
        """True if the same program gives the same bits again; rounds depend on who comes first."""
        return self.mode != "partial"

    @property
    def goes_on(self) -> bool:
        """True if training goes on after the fault, on all ranks."""
        return self.fault in ("none", "pause", "disk", "nan") or (self.fault, self.mode) == ("fewer", "partial")


def combinations(programs: list[str], networks: list[str], faults: list[str]) -> list[tuple[str, str, str, str]]:
    """Return all combinations that there are: program, mode, network, fault."""
    return [(program, mode, network, fault)
            for fault, program, network in product(faults, programs, networks)
            for mode in PROGRAMS[program] if is_possible(program, mode, network, fault)]


def is_possible(program: str, mode: str, network: str, fault: str) -> bool:
    """Return True if there is such a job: rounds need MPI, torchrun starts PyTorch."""
    return ((network == "mpi" or mode != "partial") and (network != "torchrun" or program == "torch")
            and (fault != "options" or program == "torch") and (fault != "destroy" or network == "torchrun"))


def draw(seed: int, programs: list[str], networks: list[str], faults: list[str]) -> Iterator[Plan]:
    """Yield plans without end: every combination in random order, and then again, with other ranks and times.

    No rank stands still in the last step of an epoch: the others could wait for it without end, over MPI in one of
    Horovod's own collectives, and over Gloo in its shutdown; without the plugin too.
    """
    dice = random.Random(seed)
    every = combinations(programs, networks, faults)
    dice.shuffle(every)
    for program, mode, network, fault in cycle(every):
        ranks = dice.choice((2, 3))
        rank = 0 if fault == "disk" else dice.randrange(ranks)
        steps = [step for step in range(1, EPOCHS * STEPS) if fault != "freeze" or (step + 1) % STEPS]
        yield Plan(program, mode, network, ranks, fault, rank, dice.choice(steps),
                   dice.choice((0.0, 0.002, 0.01, 0.05)), dice.choice((0, 64, 700, 3_000, 9_000)))
