"""The schemes that users choose among, and the values that they give as `compression=` or inside others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import OptionError
from .dense import Dense, DenseSum, means_dense
from .gaussiank import GaussianK
from .gtopk import GTopk
from .oktopk import OkTopk
from .options import Compression, Scheme
from .sameblocks import SameBlocks
from .topka import TopkA
from .topkdsa import TopkDSA
from .warmup import warmup_density

__all__ = ["Dense", "GTopk", "GaussianK", "OkTopk", "SameBlocks", "TopkA", "TopkDSA", "warmup_density"]


@dataclass(frozen=True, eq=False)
class Around(Compression):
    """The options of a mode around a scheme. Raise OptionError for a value that is not allowed."""

    inner: Scheme | Dense | type[Scheme | Dense] = OkTopk
    scheme: Scheme = field(init=False, repr=False)
    """The scheme that `inner` stands for."""

    def __post_init__(self) -> None:
        scheme = DenseSum() if means_dense(self.inner) else own_options(self.inner)
        if not isinstance(scheme, Scheme):
            raise OptionError(f"{type(self).__name__} takes Dense(), OkTopk(...) or another scheme; got "
                              f"{self.inner!r}")
        object.__setattr__(self, "scheme", scheme)

    def settings(self) -> Mapping[str, Any]:
        """Return the options by name, without the scheme's."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("inner", "scheme")}


def as_options(compression: Any) -> Any:
    """Return options of ours (see `own_options`), or None for one of Horovod's compressors.

    Raise OptionError for any other value.
    """
    options = own_options(compression)
    if options is None and not hasattr(compression, "compress"):
        raise OptionError("compression takes OkTopk(...) or other options of this package, or one of Horovod's, as "
                          f"hvd.Compression.none; got {compression!r}")
    return options


def own_options(compression: Any) -> Any:
    """Return options of ours (a plain class takes the defaults); None for any other value."""
    if isinstance(compression, type) and issubclass(compression, Compression):
        return compression()
    return compression if isinstance(compression, Compression) else None
