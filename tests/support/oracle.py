"""u = Topk(Σ Topk(acc)) in dense NumPy. Shares no code with the package: stable argsort, no thresholds."""

from __future__ import annotations

import numpy as np


def topk_mask(x, k):
    """Return the mask of the k largest magnitudes; ties go to the lower index, zeros are never in it."""
    mask = np.zeros(len(x), bool)
    mask[np.argsort(-np.abs(x), kind="stable")[:k]] = True
    return mask & (x != 0)


def rank_order_sum(parts):
    """Return Σ of dense vectors, element by element from rank 0 upwards, in their own precision."""
    total = np.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def oracle_step(accs, k, global_k=None):
    """Return (dense u, mask of u, local masks): one exact step on the accumulators of all ranks.

    global_k: how many are kept of the sum, if not k.
    """
    local = [topk_mask(acc, k) for acc in accs]
    total = rank_order_sum([np.where(mask, acc, 0) for mask, acc in zip(local, accs, strict=True)])
    mask = topk_mask(total, global_k or k)
    return np.where(mask, total, 0), mask, local


def oracle_run(gradients, k, global_k=None):
    """Return [(dense u, mask of u, residuals)] over the steps; gradients: shape (steps, P, n)."""
    residuals = np.zeros_like(gradients[0])
    history = []
    for step in gradients:
        accs = [residual + gradient for residual, gradient in zip(residuals, step, strict=True)]
        update, mask, local = oracle_step(accs, k, global_k)
        residuals = np.stack([np.where(sent & mask, 0, acc) for sent, acc in zip(local, accs, strict=True)])
        history.append((update, mask, residuals))
    return history
