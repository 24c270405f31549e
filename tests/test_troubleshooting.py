"""Each message that users can meet says what to do, and the page quotes messages as they are in the code.

A message is a literal text of the source that an error or a logger (at WARNING or above) is given, directly or by a
variable. What is filled in is a gap. docs/troubleshooting.md shows messages as **`text … more text`**, with … for it.
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
GAP = "…"
OF_OTHERS = "## Messages of Horovod, Open MPI and the build"
"""Heading below which other programs are quoted."""

VERBS = ("build", "call", "compile", "convert", "divide", "give", "hand", "import", "install", "keep", "leave",
         "load", "look", "make", "pass", "put", "raise", "reduce", "report", "save", "see", "set", "start", "take",
         "try", "unset", "use", "wrap", "write")
REMEDY = re.compile(rf"(?:^|[:;,.(] ?|\b(?:and|or|then|so) )(?:{'|'.join(VERBS)})\b", re.IGNORECASE)
ALLOWED = re.compile(r"(?:\b(?:must|should) be|(?:^|: )expected|\btakes) .*; got ", re.DOTALL)

WITHOUT = {
    "a defect of the package, or of a transport: users can only report it": (
        "an index lies outside of the array", "a run lies outside", "the runs must have as many elements",
        "the indices must ascend", "a message of …", "a message's … indices", "the ranks are in different",
        "the library calls this"),
    "a part of another message, which says what to do": (
        "an integer of at least", "stay as they are", "residuals …: …", "none that loads",
        "rank … has waited for … s for ranks", "Horovod's collectives", "the options say so", "gather the state"),
    "what is filled in says what to do, or the log beside it": (
        "…; its … should take …, and takes …", "the rounds of Partial could not be ended", "in the middle of a step",
        "no state for these parameters could be", "starting MPI took more", "the kernels are NumPy's",
        "using …, not MPI", "HorovodAllreduce failed"),
    "a name shared with a message": ("… of shape",),
    "stock Horovod or Python says it in the same words": (
        "gradient_predivide_factor not supported", "backward_passes_per_step must be", "named_parameters should be",
        "Parameter names in named_parameters", "named_parameters was specified"),
}
"""By the reason, beginnings of messages without a remedy."""


def text_of(node: ast.AST) -> str | None:
    """Return a literal with its gaps; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or GAP) + (right or GAP)
    return None


def texts(node: ast.AST, least: int = 2) -> Iterator[str]:
    """Yield the texts of at least `least` words in an expression."""
    text = text_of(node)
    if text is None:
        for child in ast.iter_child_nodes(node):
            yield from texts(child, least)
    elif sum(any(map(str.isalpha, word)) for word in text.split()) >= least:
        yield re.sub(rf"(?:%[-.\d]*[dsgr]|\{{\w*\}}|{GAP})+", GAP, text)


def names(node: ast.AST) -> Iterator[str]:
    """Yield the variables and attributes in an expression."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name | ast.Attribute):
            yield part.id if isinstance(part, ast.Name) else part.attr


def told(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the arguments of errors and loggers."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            name = next(names(call.func), "")
            if name.endswith("Error") or name in ("warning", "error", "exception", "critical", "warn", "refuse_step"):
                yield from call.args


def sources() -> list[Path]:
    """Return the files of the package."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def messages() -> dict[str, str]:
    """Return all messages, each with the file that has it."""
    trees = {path: ast.parse(path.read_text()) for path in sources()}
    variables = {name for tree in trees.values() for argument in told(tree) for name in names(argument)}
    found: dict[str, str] = {}
    for path, tree in trees.items():
        values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
                  and variables.intersection(names(node.targets[0] if isinstance(node, ast.Assign) else node.target))]
        for value in (*told(tree), *values):
            found.update(dict.fromkeys(texts(value), str(path.relative_to(ROOT))))
    return found


def helps(message: str) -> bool:
    """Return True if it says what is allowed and what came, or what to do."""
    return bool(REMEDY.search(message) or ALLOWED.search(message))


def test_every_message_says_what_to_do() -> None:
    excepted = tuple(part for parts in WITHOUT.values() for part in parts)
    silent = [f"{path}: {text}" for text, path in messages().items()
              if not helps(text) and not text.startswith(excepted)]
    assert not silent, "say what to do ('must be ...; got ...', or an imperative):\n" + "\n".join(silent)


def test_every_exception_is_in_the_code() -> None:
    gone = [part for parts in WITHOUT.values() for part in parts
            if not any(text.startswith(part) for text in messages())]
    assert not gone, "the code has no such message (any more): " + "; ".join(gone)


def test_every_message_that_the_page_quotes_is_in_the_code() -> None:
    page = PAGE.read_text()
    quotes = re.findall(r"\*\*`([^`]+)`\*\*", page[:page.index(OF_OTHERS)])
    assert quotes, "the page shows messages as **`text`**"
    code = "\n".join(text for path in sources() for text in texts(ast.parse(path.read_text()), least=1))
    gone = [quote for quote in quotes if " ".join(quote.strip("… ").split()) not in code]
    assert not gone, "the code has no such message (any more): " + "; ".join(gone)
