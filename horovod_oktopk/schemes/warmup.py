"""A density warm-up: more elements in the first epochs, as gTop-k has it (Shi et al., ICDCS 2019)."""

from __future__ import annotations

from collections.abc import Sequence

from .options import check_integer

WARM_UP = (0.25, 0.0725, 0.015, 0.004)
"""Densities of the paper for the first four epochs; its final density is 0.1 %."""


def warmup_density(epoch: int, densities: Sequence[float] = WARM_UP) -> float | None:
    """Return the density of an epoch, for `set_density`: more in the first epochs, as gTop-k has it.

    Args:
        epoch: the epoch that trains next, from 0.
        densities: those of the first epochs. The paper's, 25 %, 7.25 %, 1.5 % and 0.4 %, suit a final density of less
            than that.

    Returns:
        The density; None after the first epochs, for the density of the options.

    Raises:
        OptionError: The epoch is no integer of at least 0.

    Examples:
        >>> for epoch in range(epochs):
        ...     set_density(optimizer, warmup_density(epoch, [0.25, 0.1, 0.03]))
        ...     train(epoch)
    """
    check_integer("epoch", epoch, least=0)
    return densities[epoch] if epoch < len(densities) else None
