"""Words that a rank may send: Equation 3 of the paper, and what it is compared with."""

from __future__ import annotations


def dense_volume(n: float, size: int) -> float:
    """Return 2n(P-1)/P words, for Rabenseifner's allreduce."""
    return 2 * n * (size - 1) / size


def oktopk_bound(k: float, size: int, global_k: float | None = None) -> float:
    """Return Equation 3, for Ok-Topk: 2k(P-1)/P words in phase 1 and 4k'(P-1)/P in phase 2, at most.

    `global_k` is k', the elements of the sum that are kept; None means k, which makes it 6k(P-1)/P. With fewer than
    k, the mean rank keeps to this on up to 16 ranks, or if k <= k'(P-1). A rank that owns nothing of its own
    selection may need 2(k + k') words.
    """
    kept = k if global_k is None else global_k
    bound = 2 * (k + 2 * kept) * (size - 1) / size
    return bound if kept >= k else max(bound, 2 * (k + kept))
