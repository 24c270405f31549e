"""Packaging: what setup.py promises is what the tools check, and no install builds Horovod by surprise."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def keywords():
    """The arguments of setup() that are plain values."""
    calls = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Call)]
    call = next(call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "setup")
    return {each.arg: ast.literal_eval(each.value) for each in call.keywords
            if each.arg in ("python_requires", "install_requires", "extras_require")}


def test_the_oldest_python_is_the_one_that_the_tools_check():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert keywords()["python_requires"] == f">={tools['mypy']['python_version']}"
    assert tools["ruff"]["target-version"] == "py" + tools["mypy"]["python_version"].replace(".", "")


def test_no_install_builds_horovod():
    found = keywords()
    wanted = [each for requirements in (found["install_requires"], *found["extras_require"].values())
              for each in requirements]
    assert not [requirement for requirement in wanted if requirement.startswith("horovod")]
