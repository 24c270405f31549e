"""Every scheme of the papers, and Ok-Topk as it rounds and as it reuses thresholds: one table for all tests."""

from __future__ import annotations

from horovod_oktopk import GaussianK, GTopk, OkTopk, SameBlocks, TopkA, TopkDSA

SCHEMES = {"OkTopk": OkTopk(density=0.1, region_interval=4),
           "OkTopk, reused thresholds": OkTopk(density=0.1, selection="reuse", threshold_interval=3),
           "OkTopk, bfloat16": OkTopk(density=0.1, value_dtype="bfloat16"),
           "OkTopk, log4": OkTopk(density=0.1, value_dtype="log4"),
           "TopkA": TopkA(density=0.1), "TopkDSA": TopkDSA(density=0.1), "GTopk": GTopk(density=0.1),
           "naive GTopk": GTopk(density=0.1, collective="allgather"), "GaussianK": GaussianK(density=0.1),
           "SameBlocks": SameBlocks(density=0.1)}
EXACT = {name: options for name, options in SCHEMES.items() if "," not in name and name != "SameBlocks"}
"""Schemes that select by nothing but the step's own values, and send them as they are."""
