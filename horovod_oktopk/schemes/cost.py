"""Table 1 of the paper as functions: words that one rank sends, at most."""

from __future__ import annotations

from math import ceil, log2


def dense_volume(n: int, size: int) -> float:
    """Return 2n(P-1)/P words, for Rabenseifner's allreduce."""
    return 2 * n * (size - 1) / size


def topka_volume(k: int, size: int) -> float:
    """Return 2k(P-1) words, for TopkA and Gaussiank: an allgather of all ranks' top-k."""
    return 2 * k * (size - 1)


def topkdsa_volume(n: int, k: int, size: int) -> tuple[float, float]:
    """Return 4k(P-1)/P and (2k + n)(P-1)/P words, least and most, by fill-in, for TopkDSA."""
    return 4 * k * (size - 1) / size, (2 * k + n) * (size - 1) / size


def gtopk_volume(k: int, size: int) -> float:
    """Return 4k⌈log2 P⌉ words, sent and received, of the rank at the root, for gTopk."""
    return 4 * k * ceil(log2(size))


def oktopk_bound(k: float, size: int, global_k: float | None = None) -> float:
    """Return Equation 3, for Ok-Topk: 2k(P-1)/P words in phase 1 and 4k'(P-1)/P in phase 2, at most.

    If k' = k, these are 6k(P-1)/P words.

    global_k: k', elements of the sum that are kept; None: k. With fewer than k, the mean rank keeps to this. A rank
    that owns nothing of its own selection may need 2(k + k') words.
    """
    kept = k if global_k is None else global_k
    bound = 2 * (k + 2 * kept) * (size - 1) / size
    return bound if kept >= k else max(bound, 2 * (k + kept))
