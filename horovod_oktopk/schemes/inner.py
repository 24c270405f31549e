"""Schemes inside other options: `Partial(OkTopk)`, `StepAhead(Dense())`."""

from __future__ import annotations

from typing import Any, overload

from ..errors import OptionError
from .base import Compression, Scheme
from .dense import Dense, DenseSum
from .oktopk import OkTopk


class Inner:
    """A dataclass's field `inner`: it takes what users write, and gives the scheme that is run; OkTopk by default."""

    @overload
    def __get__(self, options: None, owner: type[Any]) -> type[OkTopk]: ...

    @overload
    def __get__(self, options: object, owner: type[Any]) -> Scheme: ...

    def __get__(self, options: object | None, owner: type[Any]) -> Scheme | type[OkTopk]:
        if options is None:  # the field's default
            return OkTopk
        scheme: Scheme = options.__dict__["inner"]
        return scheme

    def __set__(self, options: object, inner: Scheme | Dense | type[Scheme | Dense]) -> None:
        options.__dict__["inner"] = _scheme(inner, type(options).__name__)


OKTOPK = Inner()


def as_options(compression: Any) -> Any:
    """Options of ours (a plain class takes the defaults), or None for one of Horovod's compressors.

    Raises OptionError for what is neither.
    """
    options = _ours(compression)
    if options is None and not hasattr(compression, "compress"):
        raise OptionError("compression takes OkTopk(...) or other options of this package, or one of Horovod's, as "
                          f"hvd.Compression.none; got {compression!r}")
    return options


def _ours(compression: Any) -> Any:
    if isinstance(compression, type) and issubclass(compression, Compression):
        return compression()
    return compression if isinstance(compression, Compression) else None


def _scheme(inner: Any, owner: str) -> Scheme:
    """Raises OptionError for what is none of ours."""
    if isinstance(inner, Dense) or inner is Dense:
        return DenseSum()
    scheme = _ours(inner)
    if not isinstance(scheme, Scheme):
        raise OptionError(f"{owner} takes Dense(), OkTopk(...) or another scheme; got {inner!r}")
    return scheme
