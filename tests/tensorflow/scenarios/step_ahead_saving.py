"""`compression=StepAhead(...)`: whatever saves or loads a model has what all ranks share, or says what to write."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from horovod_oktopk import PluginError
from horovod_oktopk.tensorflow import shared_parameters
from horovod_oktopk.tensorflow.private import KERAS_3
from tests.scenarios.common import everywhere, raised_everywhere, shared_folder
from tests.tensorflow.scenarios.common import broadcast, compiled, distribute, fit, keras, make_model
from tests.tensorflow.scenarios.saving_names import PLACES, SAVES
from tests.tensorflow.scenarios.step_ahead import (
    OPTIONS,
    assert_shared_is_equal,
    model_with,
    own,
    shared,
    take_steps,
)

Arrays = list[np.ndarray]
public = import_module(keras.Model.__module__.partition(".")[0])
save_weights = getattr(public.saving, "save_weights", keras.Model.save_weights)  # tf-keras has none
early = (public.models.save_model, tf.saved_model.save)


def in_checkpoint(prefix: Path | str) -> Arrays:
    reader = tf.train.load_checkpoint(str(prefix))
    found = [reader.get_tensor(name) for name in reader.get_variable_to_shape_map()]
    return [each for each in found if isinstance(each, np.ndarray)]  # others are texts


def in_saved_model(path: Path) -> Arrays:
    return in_checkpoint(path / "variables" / "variables")


def in_model(path: Path) -> Arrays:
    loaded: Arrays = public.models.load_model(str(path), compile=False).get_weights()
    return loaded


def in_weights(path: Path) -> Arrays:
    model = make_model(seed=9)
    model.load_weights(str(path))
    weights: Arrays = model.get_weights()
    return weights


def of_file(save: Callable[[Any, str], object], name: str,
            read: Callable[[Path], Arrays]) -> Callable[[Any, Path], Arrays]:
    def write(model: Any, folder: Path) -> Arrays:
        save(model, str(folder / name))
        return read(folder / name)

    return write


def export_archive(model: Any, path: str) -> None:
    archive = public.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", lambda x: model(x), [tf.TensorSpec((None, 20))])
    archive.write_out(path)


def checkpoint(model: Any, path: str) -> None:
    tf.train.Checkpoint(model=model).write(path)


def managed_checkpoint(model: Any, folder: Path) -> Arrays:
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(part=tf.Module(), model=model), str(folder), 2)
    return in_checkpoint(manager.save())


WAYS: dict[str, Callable[[Any, Path], Arrays]] = {
    "models.save_model": of_file(public.models.save_model, "a.keras", in_model),
    "models.save_model, h5": of_file(public.models.save_model, "a.h5", in_model),
    "saving.save_model": of_file(public.saving.save_model, "b.keras", in_model),
    "models.save_model under a name of before": of_file(early[0], "c.keras", in_model),
    "saving.save_weights": of_file(save_weights, "a.weights.h5", in_weights),
    "Model.save": of_file(lambda model, path: model.save(path), "d.keras", in_model),
    "Model.save_weights": of_file(lambda model, path: model.save_weights(path), "b.weights.h5", in_weights),
    "Model.export": of_file(lambda model, path: model.export(path), "export", in_saved_model),
    "saved_model.save": of_file(tf.saved_model.save, "saved_model", in_saved_model),
    "saved_model.save under a name of before": of_file(early[1], "saved_early", in_saved_model),
    "train.Checkpoint.write": of_file(checkpoint, "written", in_checkpoint),
    "train.Checkpoint.save": lambda model, folder: in_checkpoint(
        tf.train.Checkpoint(model=model).save(f"{folder}/saved")),
    "compat.v1.train.Checkpoint.save": lambda model, folder: in_checkpoint(
        tf.compat.v1.train.Checkpoint(model=model).save(f"{folder}/first")),
    "train.CheckpointManager": managed_checkpoint,
    "export.ExportArchive": of_file(export_archive, "archive", in_saved_model),
    "Model.get_weights": lambda model, _: model.get_weights(),
    **({"Model.get_state_tree": lambda model, _: tf.nest.flatten(model.get_state_tree("numpy_array"))} if KERAS_3 else
       {"Model.save, tf": of_file(lambda model, path: model.save(path, save_format="tf"), "tf", in_saved_model),
        "models.save_model, tf": of_file(lambda model, path: public.models.save_model(model, path, save_format="tf"),
                                         "models_tf", in_saved_model),
        "Model.save_weights, tf": of_file(lambda model, path: model.save_weights(path, save_format="tf"), "weights",
                                          in_checkpoint)})}
NOT_CAUGHT = {"Model.get_weights", "models.save_model, h5", *(("Model.get_state_tree",) if KERAS_3 else ())}
"""Ways that never ask the optimizer; the guide lists them. They are right inside `shared_parameters` alone."""


def is_kept(weights: Arrays, kept: Arrays) -> bool:
    return all(any(np.array_equal(weight, each) for each in kept) for weight in weights)


def tried(model: Any, way: Callable[[Any, Path], Arrays], folder: Path) -> Arrays | str:
    """Return what a way keeps, or the error that refuses it."""
    folder.mkdir()
    try:
        return way(model, folder)
    except PluginError as error:
        return str(error)


def check_every_way_of_saving_has_what_ranks_share_or_is_refused() -> None:
    """On one rank nothing is refused: its own parameters are those that all ranks share."""
    alone = hvd.size() == 1
    wrong, caught = [], []
    model = model_with()
    for name, way in WAYS.items():
        take_steps(model, range(2))
        with shared_folder(hvd) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outside = tried(model, way, folder / f"{hvd.rank()}-outside")
            with shared_parameters(model):
                inside = tried(model, way, folder / f"{hvd.rank()}-inside")
                expected = [np.array(tf.convert_to_tensor(v)) for v in model.trainable_variables]
        if isinstance(inside, str) or not is_kept(expected, inside):
            wrong.append(name)
        if isinstance(outside, str) and "with shared_parameters(model)" in outside:
            caught.append(name)
        elif alone and not is_kept(expected, outside):
            wrong.append(f"{name}, outside")
    assert everywhere(hvd, wrong) == [[]] * hvd.size(), wrong
    assert set(WAYS) - set(caught) == (set(WAYS) if alone else NOT_CAUGHT), set(WAYS) - set(caught)
    assert_shared_is_equal(model)


WEIGHTS = "a.weights.h5" if KERAS_3 else "a.h5"


def check_every_way_of_loading_is_of_what_ranks_share_or_is_refused() -> None:
    ways: dict[str, Callable[[Any, Path], object]] = {
        "train.Checkpoint.read": lambda model, path: tf.train.Checkpoint(model=model).read(str(path / "checkpoint")),
        "train.Checkpoint.restore": lambda model, path: tf.train.Checkpoint(model=model).restore(
            str(path / "checkpoint")),
        "Model.load_weights": lambda model, path: model.load_weights(str(path / WEIGHTS))}
    with shared_folder(hvd) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = folder / str(hvd.rank())
        path.mkdir()
        saved = make_model(seed=7)
        tf.train.Checkpoint(model=saved).write(str(path / "checkpoint"))
        saved.save_weights(str(path / WEIGHTS))
        for name, load in ways.items():
            model = model_with()
            take_steps(model, range(3))
            with shared_parameters(model):
                load(model, path)
            assert np.array_equal(shared(model), own(saved)), name
            take_steps(model, range(3, 5))
            assert_shared_is_equal(model)
        whole = model_with()
        fit(whole, [broadcast()], epochs=1)
        kept, before = tf.train.Checkpoint(model=whole).write(str(path / "whole")), shared(whole)
        take_steps(whole, range(2))
        if hvd.size() == 1:
            tf.train.Checkpoint(model=whole).read(kept)
            assert np.array_equal(own(whole), before), "the only rank may load anywhere"
            return
        message = raised_everywhere(hvd, PluginError, lambda: tf.train.Checkpoint(model=whole).read(kept))[0]
        assert "with shared_parameters(model)" in message


def check_checkpoints_of_plain_optimizers_and_distributed_ones_are_alike() -> None:
    def made(is_distributed: bool) -> Any:
        model = make_model()
        optimizer = keras.optimizers.Adam(0.01)
        compiled(model, distribute(OPTIONS, optimizer) if is_distributed else optimizer)
        optimizer.build(model.trainable_variables)
        return model

    with shared_folder(hvd) as folder:
        for saves, loads in ((False, True), (True, False), (True, True)):
            saved, loading = made(saves), made(loads)
            fit(saved, [broadcast()] * saves, epochs=1)
            path = tf.train.Checkpoint(model=saved, optimizer=saved.optimizer).write(f"{folder}/{saves}{hvd.rank()}")
            status = tf.train.Checkpoint(model=loading, optimizer=loading.optimizer).read(path)
            status.assert_existing_objects_matched().assert_consumed()
            assert np.array_equal(own(loading), own(saved))


def check_every_public_name_of_keras_has_its_place() -> None:
    """Names that are new in Keras or TensorFlow are to be looked at: do they save weights?"""
    modules = {name: getattr(public, name) for name in ("saving", "models", "export")}
    found = {f"{name}.{each}" for name, module in modules.items() for each in vars(module)}
    found |= {f"saved_model.{each}" for each in dir(tf.saved_model) if callable(getattr(tf.saved_model, each))}
    found |= {f"Model.{each}" for each in dir(keras.Model)}
    found |= {f"train.{each}" for each in dir(tf.train) if "heckpoint" in each}
    public_names = {name for name in found if not name.partition(".")[2].startswith("_")}
    known = [name for names in PLACES.values() for name in names]
    assert len(known) == len(set(known))
    assert public_names <= set(known), f"new: {sorted(public_names - set(known))}"
    assert not {name for name in public_names & set(PLACES[SAVES]) if not any(way.startswith(name) for way in WAYS)}
