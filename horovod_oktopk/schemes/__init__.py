"""The schemes that users choose among."""

from .dense import Dense
from .gaussiank import GaussianK
from .gtopk import GTopk
from .oktopk import OkTopk
from .topka import TopkA
from .topkdsa import TopkDSA

__all__ = ["Dense", "GTopk", "GaussianK", "OkTopk", "TopkA", "TopkDSA"]
