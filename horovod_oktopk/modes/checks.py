"""The checks of every integration before it takes a place of Horovod's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import PluginError

NEEDED = ("{package} needs {framework}, and Horovod 0.28.1 built for it ({variable}=1); '{missing}' is not "
          "installed. Install it as docs/install.md says. `python -m horovod_oktopk check` says what is there")
ADVICE = "this version of horovod_oktopk supports Horovod 0.28: install horovod==0.28.1"


def what_is_missing(error: ModuleNotFoundError, package: str, framework: str, variable: str) -> ModuleNotFoundError:
    """Return the error to raise if a framework or Horovod is not there; the error itself, if it is another module.

    variable: the one with which Horovod is built for the framework.
    """
    if error.name not in ("torch", "tensorflow", "horovod"):
        return error
    return ModuleNotFoundError(NEEDED.format(package=package, framework=framework, variable=variable,
                                             missing=error.name), name=error.name)


def check_horovod(version: str, signatures: Mapping[Callable[..., Any], list[str]]) -> None:
    """Raise PluginError if this Horovod is not the known version.

    signatures: the parameters that each function of Horovod is expected to take.
    """
    if not version.startswith("0.28"):
        raise PluginError(f"{ADVICE}; found {version}")
    for function, expected in signatures.items():
        found = list(inspect.signature(function).parameters)
        if found != expected:
            raise PluginError(f"{ADVICE}; its {function.__qualname__} should take {expected}, and takes {found}")


def check_arguments(hvd: Any, op: Any) -> None:
    """Raise PluginError if op cannot be served. hvd: a framework's Horovod."""
    if op not in (hvd.Average, hvd.Sum):
        raise PluginError(f"with a sparse compression op must be hvd.Average or hvd.Sum; got op={op!r}"
                          + (" (Adasum)" if op == hvd.Adasum else ""))


def refuse_join(in_use: Callable[[], bool], join: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap hvd.join, to refuse it while a reduction of ours is in use."""
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if in_use():
            raise PluginError("hvd.join() cannot be used with a sparse compression: the ranks that go on would wait "
                              "for this one. Give every rank the same number of batches instead")
        return join(*args, **kwargs)
    return wrapped
