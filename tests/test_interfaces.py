"""Interfaces: nothing incomplete can be made. A forgotten `commit` would train without error feedback, silently."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import horovod_oktopk

PACKAGE = Path(horovod_oktopk.__file__).parent
UNIMPORTED = ("torch", "distributed", "tensorflow", "__main__", "transport.mpi")
"""Parts that need a framework or MPI, or that run when they are imported; their sources are read all the same."""
HOOKS = {"Mode.belongs_to", "Mode.catch_up", "Mode.close", "Mode.end", "Mode.reduce", "Mode.resume", "Mode.suspend",
         "Transport.abort"}
"""Methods of interfaces that do nothing, where a class has nothing to do there."""


def core_classes() -> Iterator[type]:
    """Yield all classes of the core. No package of a framework is imported, as pkgutil.walk_packages would."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        if not name.startswith(UNIMPORTED):
            module = importlib.import_module(f"horovod_oktopk.{name}".removesuffix(".__init__"))
            yield from (each for _, each in inspect.getmembers(module, inspect.isclass)
                        if each.__module__ == module.__name__)


ABSTRACT = sorted({each for each in core_classes() if inspect.isabstract(each)}, key=lambda each: each.__name__)


def test_the_interfaces_are_found() -> None:
    assert {"Accumulator", "Algorithm", "LocalGradients", "Mode", "ParameterAccumulator", "Ranks", "ReducedGradients",
            "ResidualAccumulator", "Signals", "Transport"} <= {each.__name__ for each in ABSTRACT}


@pytest.mark.parametrize("interface", ABSTRACT, ids=lambda each: each.__name__)
def test_whoever_leaves_a_method_out_cannot_be_made(interface: type) -> None:
    methods = sorted(interface.__abstractmethods__)  # type: ignore[attr-defined]
    for missing in methods:
        most = {name: lambda self: None for name in methods if name != missing}
        incomplete = type("Incomplete", (interface,), most)
        with pytest.raises(TypeError, match=missing):
            incomplete()


def test_methods_of_interfaces_have_a_body_or_are_abstract() -> None:
    sources = [path for path in [*PACKAGE.rglob("*.py"), *PACKAGE.glob("t*/**/*.py")] if path.is_file()]
    assert len(sources) > 80
    found = set()
    for node in [node for path in sources for node in ast.walk(ast.parse(path.read_text()))]:
        if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            assert not [each for each in methods if "raise NotImplementedError" in ast.unparse(each.body[-1])]
            found |= {f"{node.name}.{each.name}" for each in methods
                      if "abstractmethod" not in map(ast.unparse, each.decorator_list) and is_empty(each)}
    assert {name for name in found if name.split(".")[0] in {each.__name__ for each in ABSTRACT}} == HOOKS


def is_empty(function: ast.FunctionDef) -> bool:
    """Return True if a function has nothing but a docstring."""
    return all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in function.body)


def test_no_protocol_is_a_base() -> None:
    bases = {base for each in core_classes() for base in each.__mro__[1:] if base.__module__.startswith("horovod")}
    assert not [base for base in bases if getattr(base, "_is_protocol", False)]
