"""Prints the names of other packages that importing the plugin, and making a distributed optimizer, changes.

    python -m tests.wrapped_names torch|tensorflow
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType
from typing import Any

PACKAGES = ("horovod", "keras", "tensorflow", "tf_keras", "torch")


def names() -> dict[str, int]:
    """Return the attributes of all modules and classes of other packages, each with its value's identity."""
    found: dict[str, int] = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", None)
        if not isinstance(module, ModuleType) or str(name).partition(".")[0] not in PACKAGES:
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}.{key}.{each}": id(member) for each, member in vars(value).items()
                          if callable(member) or isinstance(member, property | staticmethod | classmethod)}
    return found


def is_changed(name: str, value: int, before: dict[str, int]) -> bool:
    """Return True also if a class has got what it only inherited; modules get names by every import."""
    owner = name.rpartition(".")[0]
    return before[name] != value if name in before else owner in before and owner not in sys.modules


def main() -> None:
    framework = sys.argv[1]
    hvd: Any = importlib.import_module(f"horovod.{framework}")
    if framework == "torch":
        importlib.import_module("horovod.torch.elastic")
        torch = importlib.import_module("torch")
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    else:
        importlib.import_module("horovod.tensorflow.elastic")
        importlib.import_module("horovod.tensorflow.keras.callbacks")
        tf = importlib.import_module("tensorflow")
        optimizer = tf.keras.optimizers.SGD(0.1)
        tf.keras.Sequential([tf.keras.layers.Dense(1)]).compile(optimizer)
    before, kept = names(), [list(vars(module).values()) for module in list(sys.modules.values())
                             if isinstance(module, ModuleType)]  # so that no identity is used again
    plugin = importlib.import_module(f"horovod_oktopk.{framework}")
    hvd.DistributedOptimizer(optimizer, compression=plugin.StepAhead(plugin.OkTopk(density=0.1)))
    after = names()
    assert kept
    print(json.dumps(sorted(name for name, value in after.items() if is_changed(name, value, before))))


if __name__ == "__main__":
    main()
