"""`compression=StepAhead(...)`: every way in which Keras and TensorFlow save a model writes what all ranks share."""

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
from horovod_oktopk.tensorflow.versions import KERAS_3
from tests.scenarios.common import everywhere, raised_everywhere, shared_folder
from tests.tensorflow.scenarios.common import fit, keras, make_model
from tests.tensorflow.scenarios.saving_names import PLACES, SAVES
from tests.tensorflow.scenarios.step_ahead import assert_shared_is_equal, model_with, own, shared, take_steps

Arrays = list[np.ndarray]
public = import_module(keras.Model.__module__.partition(".")[0])
save_weights = getattr(public.saving, "save_weights", keras.Model.save_weights)  # tf-keras has none
early = (public.models.save_model, tf.saved_model.save)


def in_checkpoint(prefix: Path | str) -> Arrays:
    reader = tf.train.load_checkpoint(str(prefix))
    return [reader.get_tensor(name) for name in reader.get_variable_to_shape_map()]


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


def numbered_checkpoint(model: Any, folder: Path) -> Arrays:
    return in_checkpoint(tf.train.Checkpoint(model=model).save(str(folder / "saved")))


def first_checkpoint(model: Any, folder: Path) -> Arrays:
    return in_checkpoint(tf.compat.v1.train.Checkpoint(model=model).save(str(folder / "first")))


def managed_checkpoint(model: Any, folder: Path) -> Arrays:
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(part=tf.Module(), model=model), str(folder), 2)
    return in_checkpoint(manager.save())


def checkpoint_by_a_thread(model: Any, folder: Path) -> Arrays:
    """Twice: the first time makes the copies that the thread writes. With variables of Keras 3 TensorFlow fails then.
    """
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    of_thread = tf.train.Checkpoint(model=model)
    for name in ("thread",) if KERAS_3 else ("before", "thread"):
        take_steps(model, range(2))
        of_thread.write(str(folder / name), options=options)
    of_thread.sync()
    return in_checkpoint(folder / "thread")


def state_tree(model: Any, folder: Path) -> Arrays:
    expected, tree = model.get_weights(), model.get_state_tree()
    take_steps(model, range(3, 4))
    leaves = [np.asarray(each) for each in tf.nest.flatten(tree)]
    assert is_kept(expected, leaves), "they are not the variables, which have changed"
    return [np.asarray(each) for each in tf.nest.flatten(model.get_state_tree(value_format="numpy_array"))]


def backup(model: Any, folder: Path) -> Arrays:
    """In the middle of an epoch."""
    def look(batch: int, logs: Any = None) -> None:
        if batch == 2:
            kept.append(in_checkpoint(tf.train.latest_checkpoint(str(folder / "chief"))))
            assert is_kept(model.get_weights(), kept[0])

    kept: list[Arrays] = []
    fit(model, [keras.callbacks.BackupAndRestore(str(folder), save_freq=3),
                keras.callbacks.LambdaCallback(on_train_batch_end=look)], epochs=1)
    assert kept
    return model.get_weights()  # type: ignore[no-any-return]


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
    "train.Checkpoint.save": numbered_checkpoint,
    "compat.v1.train.Checkpoint.save": first_checkpoint,
    "train.CheckpointManager": managed_checkpoint,
    "train.Checkpoint.write, by a thread": checkpoint_by_a_thread,
    "export.ExportArchive": of_file(export_archive, "archive", in_saved_model),
    **({"Model.get_state_tree": state_tree} if KERAS_3 else
       {"Model.save, tf": of_file(lambda model, path: model.save(path, save_format="tf"), "tf", in_saved_model),
        "models.save_model, tf": of_file(lambda model, path: public.models.save_model(model, path, save_format="tf"),
                                         "models_tf", in_saved_model),
        "Model.save_weights, tf": of_file(lambda model, path: model.save_weights(path, save_format="tf"), "weights",
                                          in_checkpoint),
        "callbacks.BackupAndRestore(save_freq)": backup})}


def is_kept(weights: Arrays, kept: Arrays) -> bool:
    return all(any(np.array_equal(weight, each) for each in kept) for weight in weights)


def check_every_way_of_saving_writes_what_ranks_share() -> None:
    wrong = []
    for name, way in WAYS.items():
        model = model_with()
        take_steps(model, range(3))
        model.get_weights()  # applies what is under way
        before, step = own(model), int(model.optimizer.iterations.numpy())
        with shared_folder(hvd) as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mine = folder / str(hvd.rank())
            mine.mkdir()
            try:
                kept = way(model, mine)
                is_shared = is_kept(model.get_weights(), kept)
            except Exception as error:
                is_shared, name = False, f"{name}: {type(error).__name__}: {error}"
            if not is_shared:
                wrong.append(name)
        assert step != int(model.optimizer.iterations.numpy()) or np.array_equal(before, own(model)), name
        assert_shared_is_equal(model)
        take_steps(model, range(4, 6))
        assert_shared_is_equal(model)
    assert everywhere(hvd, wrong) == [[]] * hvd.size(), wrong


def check_a_checkpoint_inside_a_graph_is_refused() -> None:
    model = model_with()
    take_steps(model, range(2))
    kept = tf.train.Checkpoint(model=model)
    kept.save_counter  # noqa: B018 (a variable, which a tf.function must not make)
    with shared_folder(hvd) as folder:
        write = tf.function(lambda: kept.write(str(folder / str(hvd.rank()))))
        assert "write it outside" in raised_everywhere(hvd, PluginError, write)[0]
    take_steps(model, range(2, 4))
    assert_shared_is_equal(model)


def check_every_way_of_loading_is_of_what_ranks_share() -> None:
    ways: dict[str, Callable[[Any, Path], object]] = {
        "train.Checkpoint.read": lambda model, path: tf.train.Checkpoint(model=model).read(str(path / "checkpoint")),
        "train.Checkpoint.restore": lambda model, path: tf.train.Checkpoint(model=model).restore(
            str(path / "checkpoint"))}
    if KERAS_3:
        ways |= {"saving.load_weights": lambda model, path: public.saving.load_weights(model, path / "a.weights.h5"),
                 "saving.load_weights, h5": lambda model, path: public.saving.load_weights(model, path / "a.h5"),
                 "model.set_state_tree": lambda model, path: model.set_state_tree(
                     {"trainable_variables": {v.path: value for v, value in zip(
                         model.trainable_variables, saved.get_weights(), strict=True)}})}
    with shared_folder(hvd) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = folder / str(hvd.rank())
        path.mkdir()
        saved = make_model(seed=7)
        tf.train.Checkpoint(model=saved).write(str(path / "checkpoint"))
        saved.save_weights(str(path / "a.weights.h5"))
        saved.save(str(path / "a.h5"))
        for name, load in ways.items():
            model = model_with()
            take_steps(model, range(3))
            load(model, path)
            assert np.array_equal(shared(model), own(saved)), name
            assert np.array_equal(own(model), own(saved)), name
            take_steps(model, range(3, 5))
            assert_shared_is_equal(model)


def check_every_public_name_of_keras_has_its_place() -> None:
    """A name that is new in Keras or TensorFlow is to be looked at: does it save weights?"""
    modules = {name: getattr(public, name) for name in ("saving", "models", "export")}
    found = {f"{name}.{each}" for name, module in modules.items() for each in vars(module)}
    found |= {f"saved_model.{each}" for each in dir(tf.saved_model) if callable(getattr(tf.saved_model, each))}
    found |= {f"Model.{each}" for each in dir(keras.Model)}
    found |= {f"train.{each}" for each in dir(tf.train) if "heckpoint" in each}
    public_names = {name for name in found if not name.partition(".")[2].startswith("_")}
    known = [name for names in PLACES.values() for name in names]
    assert len(known) == len(set(known))
    assert public_names <= set(known), f"new: {sorted(public_names - set(known))}"
    not_tried = {name for name in public_names & set(PLACES[SAVES]) if not any(way.startswith(name) for way in WAYS)}
    assert not_tried == {"Model.get_weights"}, not_tried  # what the others are compared with
