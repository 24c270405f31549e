"""Imports point one way: integrations → partial → reducer → schemes → phases → selection → vectors → kernels."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "horovod_oktopk"
HEAVY = {"torch", "tensorflow", "keras", "tf_keras", "horovod", "mpi4py"}


def module_of(path):
    """The name under which a file is installed."""
    house = ROOT / PACKAGE if path.is_relative_to(ROOT / PACKAGE) else ROOT / "integrations"
    return (PACKAGE, *path.relative_to(house).with_suffix("").parts)


def imported(path):
    """Absolute names of all that a file imports, anywhere in it."""
    package = module_of(path)[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[:len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            yield ".".join(base)
            yield from (".".join([*base, alias.name]) for alias in node.names)


def files(folder):
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"no files in {folder}"
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in found]


def within(name, module):
    return name == module or name.startswith(module + ".")


def ours(path):
    return [name for name in imported(path) if within(name, PACKAGE) and name != PACKAGE]


def roots(path):
    return {name.split(".")[0] for name in imported(path)}


LAYERS = ("kernels", "vectors", "selection", "phases", "schemes", "reducer", "partial")


@pytest.mark.parametrize("path", [path for layer in LAYERS[:5] for path in files(f"{PACKAGE}/{layer}")])
def test_algorithms_know_numpy_the_standard_library_the_types_of_a_transport_and_what_lies_below(path):
    assert roots(path) <= {PACKAGE, "numpy", *sys.stdlib_module_names}
    below = LAYERS[:LAYERS.index(path.parent.name) + 1]
    allowed = [f"{PACKAGE}.{name}" for name in (*below, "errors", "timing", "transport.base", "transport.counting")]
    for name in ours(path):
        assert any(within(name, module) for module in allowed), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", files(f"{PACKAGE}/transport"))
def test_a_transport_knows_nothing_of_ours_but_errors(path):
    allowed = [f"{PACKAGE}.transport", f"{PACKAGE}.errors"]
    for name in ours(path):
        assert any(within(name, module) for module in allowed), f"{path.name} imports {name}"
    assert not roots(path) & (HEAVY - {"mpi4py"})


@pytest.mark.parametrize("path", files(PACKAGE))
def test_the_neutral_package_imports_no_framework(path):
    if path.name != "__main__.py":  # it reports which frameworks are installed
        assert not roots(path) & (HEAVY - {"mpi4py"})
        assert not any(within(name, f"{PACKAGE}.{framework}") for name in ours(path)
                       for framework in ("torch", "tensorflow"))
    assert "mpi4py" not in roots(path) or path.name in ("mpi.py", "connect.py", "__main__.py")


@pytest.mark.parametrize("path", files("integrations"))
def test_integrations_do_not_import_each_other(path):
    framework = path.relative_to(ROOT / "integrations").parts[0]
    others = {folder.name for folder in (ROOT / "integrations").iterdir() if folder.is_dir()} - {framework}
    for name in ours(path):
        assert not any(within(name, f"{PACKAGE}.{other}") for other in others)


def test_importing_the_package_loads_no_framework_and_no_mpi():
    code = f"import sys, {PACKAGE}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
