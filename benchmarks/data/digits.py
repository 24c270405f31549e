"""Handwritten digits: 1,797 images of 8 x 8 pixels, which come with scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

Array = np.ndarray[Any, Any]


def split_digits(seed: int, shape: tuple[int, ...]) -> tuple[Array, Array, Array, Array]:
    """Return training images, test images (a fifth), and the labels of both; the same on every rank.

    Images are float32 with mean 0 and deviation 1, each in this shape; labels are int64.
    """
    images, labels = load_digits(return_X_y=True)
    images = ((images - images.mean()) / images.std()).astype(np.float32).reshape(-1, *shape)
    parts: tuple[Array, Array, Array, Array] = tuple(
        train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed))
    return parts
