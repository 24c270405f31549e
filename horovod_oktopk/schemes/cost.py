"""Table 1 of the paper as functions: words that one rank sends, in the worst case where it is an interval."""

from __future__ import annotations

from math import ceil, log2


def dense_volume(n: int, size: int) -> float:
    """Rabenseifner's allreduce: 2n(P-1)/P words."""
    return 2 * n * (size - 1) / size


def topka_volume(k: int, size: int) -> float:
    """TopkA and Gaussiank, an allgather of everyone's top-k: 2k(P-1) words."""
    return 2 * k * (size - 1)


def topkdsa_volume(n: int, k: int, size: int) -> tuple[float, float]:
    """TopkDSA: from 4k(P-1)/P to (2k + n)(P-1)/P words, by fill-in."""
    return 4 * k * (size - 1) / size, (2 * k + n) * (size - 1) / size


def gtopk_volume(k: int, size: int) -> float:
    """gTopk: 4k⌈log2 P⌉ words, sent and received, of the rank at the root."""
    return 4 * k * ceil(log2(size))


def oktopk_bound(k: int, size: int) -> float:
    """Ok-Topk, Equation 3: at most 6k(P-1)/P words."""
    return 6 * k * (size - 1) / size
