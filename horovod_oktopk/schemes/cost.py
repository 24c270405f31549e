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


def oktopk_bound(k: float, size: int, global_k: float | None = None) -> float:
    """Ok-Topk, Equation 3: at most 2k(P-1)/P words in phase 1 and 4k'(P-1)/P in phase 2, so 6k(P-1)/P where k' = k.

    global_k: k', elements of the sum that are kept; None: k. With fewer than k, the mean rank keeps to this; one that
    owns nothing of what it has selected may need 2(k + k') words.
    """
    kept = k if global_k is None else global_k
    bound = 2 * (k + 2 * kept) * (size - 1) / size
    return bound if kept >= k else max(bound, 2 * (k + kept))
