"""The compressions that the programs take, by name."""

from horovod_oktopk import OkTopk, StepAhead

COMPRESSIONS = {"oktopk": OkTopk(density=0.05), "step-ahead": StepAhead(OkTopk(density=0.05))}
