"""The names of other packages: those that are changed, and the private ones that are read."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from operator import attrgetter

import pytest

from horovod_oktopk.transport.horovod import check_horovod

TORCH = {"horovod.common.elastic.State.__init__", "horovod.torch.DistributedOptimizer", "horovod.torch.join",
         "horovod.torch.mpi_ops.join", "horovod.torch.optimizer.DistributedOptimizer",
         "horovod.torch.mpi_lib_v2.horovod_torch_reset", "torch.amp.grad_scaler.GradScaler.unscale_",
         *(f"horovod.torch.mpi_ops._{kind}_async" for kind in (
             "allgather", "allreduce", "alltoall", "broadcast", "grouped_allgather", "grouped_allreduce",
             "grouped_reducescatter", "reducescatter"))}
TENSORFLOW = {"horovod._keras.create_distributed_optimizer", "horovod._keras.load_model",
              "horovod.common.elastic.State.__init__",
              "horovod.tensorflow.DistributedGradientTape", "horovod.tensorflow.DistributedOptimizer",
              "horovod.tensorflow.join", "horovod.tensorflow.mpi_ops.join"}
KERAS_3 = {f"keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer.{method}"
           for method in ("apply", "scale_loss")}
TF_KERAS = {f"tf_keras.src.mixed_precision.loss_scale_optimizer.LossScaleOptimizer{version}.{method}"
            for version in ("", "V3") for method in ("apply_gradients", "get_scaled_loss")}
"""docs/architecture.md has a reason for each."""


def run(program: list[str], legacy: bool) -> str:
    keras = {"TF_USE_LEGACY_KERAS": "1"} if legacy else {}
    return subprocess.run([sys.executable, *program], env=os.environ | keras, capture_output=True, text=True,
                          check=True).stdout.splitlines()[-1]


@pytest.mark.parametrize(("framework", "legacy", "expected"), [
    ("torch", False, TORCH), ("tensorflow", False, TENSORFLOW | KERAS_3),
    ("tensorflow", True, TENSORFLOW | TF_KERAS)])
def test_importing_the_plugin_changes_these_names_and_no_others(framework, legacy, expected):
    """One name is not seen: horovod_shutdown in Horovod's C library."""
    assert set(json.loads(run(["-m", "tests.wrapped_names", framework], legacy))) == expected


@pytest.mark.parametrize("framework", ["torch", "torch_base", "distributed", "tensorflow"])
def test_private_names_of_other_packages_are_there(framework):
    private = importlib.import_module(f"horovod_oktopk.{framework}.private")
    missing = []
    for name in private.NAMES:
        module, _, path = name.partition(":")
        try:
            attrgetter(path)(importlib.import_module(module))
        except (AttributeError, ImportError) as error:
            missing.append(f"{name}: {error}")
    assert not missing, f"seen in {private.SEEN}; these are gone: {missing}"
    objects = {"torch": lambda: importlib.import_module("horovod.torch.elastic").TorchState()._handlers,
               "torch_base": lambda: private.torch.optim.SGD([private.torch.ones(1)])._optimizer_step_post_hooks,
               "distributed": lambda: None,  # DDP needs a process group: see tests/distributed/scenarios/ddp.py
               "tensorflow": lambda: private.tf.keras.optimizers.SGD()._trainable_variables}
    objects[framework]()


def test_horovods_autotuning_is_said_to_have_no_effect(monkeypatch, caplog):
    check_horovod("0.28.1", {})
    assert not caplog.messages
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    check_horovod("0.28.1", {})
    assert "none of OkTopk's" in caplog.text
