"""Where operations are being built."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def present_graphs() -> list[Any]:
    """The graph being built and those around it; [None] where operations run eagerly."""
    if tf.executing_eagerly():
        return [None]
    graphs = [tf.compat.v1.get_default_graph()]
    while (outer := getattr(graphs[-1], "outer_graph", None)) is not None:
        graphs.append(outer)
    return graphs
