"""docs/troubleshooting.md has the messages of the code as they are, and all that users can meet.

A message is a literal text of the source; what is filled in is a gap. On the page an entry begins with lines such as
**`text … more text`**, in which … stands for what is filled in. It covers the messages that begin with its text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("horovod_oktopk", "integrations")
GAP = "\0"
OF_OTHERS = "## Messages of Horovod, Open MPI and the build"
"""What follows quotes other programs."""

LEFT_OUT = {
    "a line of a roll call's description, which is shown as part of an AgreementError": (
        "parameter …: shape", "sparse gradient, …", "load the state from …", "save the state to …",
        "gather the state (gather_state_dict)", "take a step",
        "average the metrics of an epoch",
        "broadcast variables at the end of an epoch", "save the state at the end of an epoch"),
    "a line of `check`, which says itself what to do": (
        "install Horovod 0.28.1, built for your framework", "found …, supported is …", "Horovod was built without",
        "mpi4py is not installed: pip install mpi4py", "through Horovod's own alltoall and allgather",
        "Horovod is not installed", "PyTorch is not installed",
        "PyTorch sees no CUDA device", "gradients on CUDA devices", "pip install numpy",
        "OkTopk can", "is not installed: pip install …", "not installed: …", "it ended without a message"),
    "the help of a command": (
        "python -m …", "n, gradient elements of the model", "share of them that is selected",
        "share that is kept of the sum", "of a rank's link in each direction", "of one message, with its unit",
        "measure bandwidth and latency between the ranks", "say what works here", "predict what dense, OkTopk"),
    "the prediction of `advise`": (
        "parameters, … ranks, density", "MB … ms", "Dense wins: it takes", "is … times faster than dense",
        "Over MPI StepAhead's communication is hidden", "Accuracy, measured at density 1 %"),
    "no error: said at INFO or DEBUG, or beside the progress": (
        "Epoch …: the learning rate has reached",
        "no shared memory", "n = … in … tensors", "kernels in …", "ranks… over …", "on … hosts",
        "times the density", "at density …",
        "Horovod's collectives, as …", "the options say so", "StepAhead(…), gain …"),
    "what holds in place of a name of an earlier version": (
        "StepAhead(...) around the scheme hides", "`python -m horovod_oktopk advise` says", "in_order=False is the",
        "density=k / n selects", "8 messages fly", "it is always", "a step that is not applied loses its update"),
    "a text of Horovod's, which is looked for": ("Horovod has been shut down",),
    "what stock Horovod says in the same words": (
        "gradient_predivide_factor not supported", "backward_passes_per_step must be", "named_parameters should be",
        "Parameter names in named_parameters", "named_parameters was specified"),
    "a part of another message": (
        "in (0, 1], None or \"auto\"", "above 0, None or \"auto\"", "optimizer: normalizes its gradients",
        "an integer of at least", ", or True or False", "at least 1",
        "stay as they are", "start at zero", "mpi4py is not installed (pip", "mpi4py has loaded another MPI library",
        "MPI runs without MPI_THREAD_MULTIPLE", "another rank cannot use", "and … more ranks", "of shape …",
        "found …", "got an inner scheme with transport='horovod'", "on …, of shape …"),
    "a defect of the package, or of a transport: nobody can do anything but report it": (
        "an index lies outside of the array", "the indices must ascend", "a message of …", "a message's … indices",
        "the ranks are in different rounds", "a single rank exchanges no messages",
        "… bytes were announced; got …"),
    "Python's own error for an attribute that is not there": ("… has no …", "module … has no attribute …"),
    "a program": ("import ctypes, glob, os",),
}
"""By the reason, beginnings of messages that have no entry."""


def text_of(node: ast.AST) -> str | None:
    """A literal with its gaps; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or GAP) + (right or GAP)
    return None


def literals(node: ast.AST, raised: bool = False) -> Iterator[tuple[str, bool]]:
    """All texts that are not docstrings, and whether they are given to an error or a logger directly."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        text = text_of(child)
        if text is None:
            yield from literals(child, isinstance(child, ast.Call) and tells(child))
        else:
            yield re.sub(r"%[-.\d]*[dsgr]|\{\w*\}", GAP, text), raised


def tells(call: ast.Call) -> bool:
    """Whether it makes an error, or logs at WARNING or above."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name.endswith("Error") or name in ("warning", "error", "exception", "critical", "warn")


@cache
def messages() -> dict[str, str]:
    """What users can meet, with the file that has it: what errors and loggers are given, and what else is a sentence,
    as it may reach them by way of a variable."""
    found: dict[str, str] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for text, raised in literals(ast.parse(path.read_text())):
            if words(text) >= (1 if raised else 2) and (raised or len(text.split()) >= 3):
                found.setdefault(text, str(path.relative_to(ROOT)))
    return found


def words(text: str) -> int:
    """Those with a letter, between spaces."""
    return sum(any(map(str.isalpha, word)) for word in text.split())


@cache
def quotes() -> list[str]:
    """The page's texts of this package's messages."""
    page = PAGE.read_text()
    own = page[:page.index(OF_OTHERS)]
    return [" ".join(quote.split()) for quote in re.findall(r"^\*\*`([^`]+)`\*\*", own, re.MULTILINE)]


def pattern(quote: str) -> re.Pattern[str]:
    """A … inside stands for gaps; at an end for anything."""
    return re.compile(rf"{GAP}[{GAP}, ]*".join(map(re.escape, quote.strip("…;, ").split("…"))))


def begins(text: str, quote: str) -> bool:
    """Whether the message begins with the quote; gaps before it do not count."""
    return pattern(quote).match(text.lstrip(f"{GAP};, \n")) is not None


def test_every_text_on_the_page_is_one_of_the_code() -> None:
    unknown = [quote for quote in quotes() if not any(pattern(quote).search(text) for text in messages())]
    assert not unknown, "the code has no such message (any more): " + "; ".join(unknown)


def test_every_message_of_the_code_is_on_the_page() -> None:
    known = [*quotes(), *(part for parts in LEFT_OUT.values() for part in parts)]
    missing = [f"{path}: {text.replace(GAP, '…')}" for text, path in messages().items()
               if not any(begins(text, quote) for quote in known)]
    assert not missing, ("docs/troubleshooting.md has no entry for (else give a reason in LEFT_OUT):\n"
                         + "\n".join(missing))


def test_what_is_left_out_is_there() -> None:
    gone = [part for parts in LEFT_OUT.values() for part in parts
            if not any(pattern(part).search(text) for text in messages())]
    assert not gone, "the code has no such message (any more): " + "; ".join(gone)


def test_gaps_stand_for_what_is_filled_in() -> None:
    tree = ast.parse('raise OptionError(f"k must be {least}; got " + repr(k))\nlogger.warning("%d of {size}", 1)')
    assert list(literals(tree)) == [(f"k must be {GAP}; got {GAP}", True), (f"{GAP} of {GAP}", True)]
    assert pattern("k must be …; got …").search(f"k must be {GAP}; got {GAP}")
    assert not pattern("k must be …, got …").search(f"k must be {GAP}; got {GAP}")
    assert not pattern("k must … got …").search(f"k must be {GAP}; got {GAP}")
