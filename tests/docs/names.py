"""Names in code of this package's: what the code imports exists, and so do the arguments that it gives."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from typing import Any


def mistakes(tree: ast.AST) -> Iterator[str]:
    """Yield the mistakes, in words."""
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _import(node, known)
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
                _value(node, known)
            elif isinstance(node, ast.Call):
                yield from _call(node, _value(node.func, known))
        except AttributeError as error:
            yield str(error)


def _import(node: ast.Import | ast.ImportFrom, known: dict[str, Any]) -> Iterator[str]:
    """Add what is imported of this package to the known names; yield mistakes."""
    if isinstance(node, ast.Import):
        for each in node.names:
            if each.name.startswith("horovod_oktopk") and each.asname:
                known[each.asname] = importlib.import_module(each.name)
    elif node.module and node.module.startswith("horovod_oktopk"):
        module = importlib.import_module(node.module)
        for each in node.names:
            if hasattr(module, each.name):
                known[each.asname or each.name] = getattr(module, each.name)
            else:
                yield f"{node.module} has no {each.name}"


def _call(node: ast.Call, called: Any) -> Iterator[str]:
    if not callable(called):  # None: not of this package
        return
    takes = inspect.signature(called).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        for given in node.keywords:
            if given.arg is not None and given.arg not in takes:
                yield f"{ast.unparse(node.func)} takes {list(takes)}, and not {given.arg}"


def _value(node: ast.AST, known: dict[str, Any]) -> Any:
    """Return the value of a name, or of an attribute of one; None if it is not of this package."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, known)
        return getattr(owner, node.attr) if inspect.ismodule(owner) else None
    return None
