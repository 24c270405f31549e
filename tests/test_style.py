"""The language of docstrings: what ruff does not check."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("horovod_oktopk", "integrations", "benchmarks", "tests", "examples", "scripts")
SOURCES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
NO_BEGINNING = {"As", "Has", "How", "Of", "So", "That", "Those", "What", "Where", "Whether", "Which", "Who"}
"""A docstring begins with a verb (Return, Raise, Select) or a noun."""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    texts = [node.value.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr)
             and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    assert not [text for text in texts if text.split()[0].strip(",.:;") in NO_BEGINNING]
