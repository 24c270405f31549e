"""Files that cannot be written, are damaged, or of another dtype: the same error on all ranks, and nothing taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import pytest

from horovod_oktopk import OptionError
from horovod_oktopk.state import gather
from horovod_oktopk.state.archive import HOST
from tests.modes.test_gradient_mode import make, on_ranks, take_steps
from tests.support.full_disk import room_for

WIDE = [("a", (50, 2), "float64"), ("b", (3,), "float64")]
OTHERS = [("c", (40,), "float32")]


def trained(transport, steps, *entries):
    """Return a reducer that has taken `steps` steps."""
    reducer = make(transport, *entries)
    take_steps(reducer, transport.rank, range(steps))
    return reducer


def save(path, size=3, *entries):
    def program(transport):
        reducer = trained(transport, 4, *entries)
        gather.save([reducer], path, epoch=1)
        return reducer.read_residual()

    return on_ranks(size, program)


def refused(path, size=3):
    """Return the error that loading raises on all ranks, which have taken nothing, and go on."""
    def program(transport):
        reducer = trained(transport, 2)
        before = reducer.read_residual()
        with pytest.raises(OptionError) as caught:
            gather.load(reducer, 0, path)
        assert reducer.read_residual().tobytes() == before.tobytes()
        take_steps(reducer, transport.rank, range(2, 3))
        return str(caught.value)

    (message,) = set(on_ranks(size, program))
    return message


def content_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path, content):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def change_records(path, change):
    content = content_of(path)
    records = json.loads(content["records.json"])
    changed = change(records)
    content["records.json"] = json.dumps(changed if changed == [records] else records)
    rewrite(path, content)


def replace_residual(path, rank, values):
    content = content_of(path)
    del content[f"0.{rank}.npy"]
    rewrite(path, content)
    with zipfile.ZipFile(path, "a") as archive, archive.open(f"0.{rank}.npy", "w") as file:
        np.lib.format.write_array(file, values)


@pytest.mark.parametrize("size", [1, 3])
def test_wherever_the_disk_is_full_training_goes_on_as_without_the_save(size, tmp_path):
    save(tmp_path / "whole", size)
    length = (tmp_path / "whole").stat().st_size
    (tmp_path / "state").write_bytes(b"of before")
    limits = [*range(0, length, max(1, length // 12)), length - 1]

    def program(transport, limits):
        reducer = trained(transport, 4)
        messages = []
        for _ in limits:
            with pytest.raises(OSError, match="rank 0 could not save the state to .*: File too large") as caught:
                gather.save([reducer], tmp_path / "state", epoch=1)
            messages.append(str(caught.value))
        return take_steps(reducer, transport.rank, range(4, 8)).tobytes(), reducer.read_residual().tobytes(), messages

    undisturbed = on_ranks(size, lambda transport: program(transport, [])[:2])
    for limit in limits:
        with room_for(limit):
            found = on_ranks(size, lambda transport: program(transport, [0]))
        assert [each[:2] for each in found] == undisturbed
        assert all(each[2] == found[0][2] for each in found)
        assert (tmp_path / "state").read_bytes() == b"of before"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "whole"]


@pytest.mark.parametrize("place", ["no folder", "a folder"])
def test_a_file_that_cannot_be_opened_or_named_is_the_same_error_on_all_ranks(place, tmp_path):
    path = tmp_path / "there"
    if place == "a folder":
        path.mkdir()
    else:
        path = path / "state"

    def program(transport):
        reducer = trained(transport, 1)
        with pytest.raises(OSError, match="rank 0 could not save") as caught:
            gather.save([reducer], path)
        take_steps(reducer, transport.rank, range(1, 2))
        return type(caught.value), str(caught.value)

    assert len(set(on_ranks(3, program))) == 1
    assert not list(tmp_path.glob("*.part"))


def test_what_fails_on_another_rank_is_told_to_all(tmp_path, monkeypatch):
    def program(transport):
        reducer = trained(transport, 1)
        if transport.rank == 2:
            monkeypatch.setattr(reducer, "records", lambda: np.empty(1 << 50))
        with pytest.raises(Exception, match="rank 2 could not save the state to .*: .*llocat") as caught:
            gather.save([reducer], tmp_path / "state")
        return str(caught.value)

    assert len(set(on_ranks(3, program))) == 1
    assert not list(tmp_path.iterdir())


def test_marks_that_are_not_plain_are_refused_on_all_ranks(tmp_path):
    def program(transport):
        reducer = trained(transport, 1)
        with pytest.raises(OptionError, match="must be plain values"):
            gather.save([reducer], tmp_path / "state", model=object())

    on_ranks(2, program)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_program_has_left_is_removed_and_what_others_write_is_not(tmp_path):
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True,
                          check=True)
    gone = tmp_path / f"another.{HOST}-{int(done.stdout)}.oktopk.part"
    kept = [tmp_path / f"another.{HOST}-{os.getppid()}.oktopk.part", tmp_path / "another.elsewhere-1.oktopk.part",
            tmp_path / "mine.part"]
    for each in (gone, *kept):
        each.write_bytes(b"half")
    save(tmp_path / "state", 1)
    assert not gone.exists()
    assert all(each.exists() for each in kept)


@pytest.mark.parametrize(("written", "read"), [([WIDE], []), ([], [WIDE])])
def test_a_residual_of_another_dtype_is_converted_on_all_ranks(written, read, tmp_path):
    held = save(tmp_path / "state", 3, *written)

    def program(transport):
        reducer = make(transport, *read)
        gather.load(reducer, 0, tmp_path / "state")
        return reducer.read_residual()

    for before, found in zip(held, on_ranks(3, program), strict=True):
        assert before.dtype != found.dtype
        assert np.array_equal(before.astype(found.dtype), found)


FEWER = [("a", (50, 2), "float32")]
MORE = [("new", (7,), "float32"), *FEWER, ("b", (3,), "float32")]


@pytest.mark.parametrize("read", [FEWER, MORE], ids=["fewer", "more"])
@pytest.mark.filterwarnings("ignore:the checkpoint has a residual of other parameters")
def test_parameters_that_were_frozen_or_thawed_since_begin_anew_and_the_others_keep_their_residual(read, tmp_path):
    held = save(tmp_path / "state")

    def program(transport):
        reducer = make(transport, read)
        gather.load(reducer, 0, tmp_path / "state")
        found = reducer.read_residual()
        take_steps(reducer, transport.rank, range(4, 6))
        return found

    for before, found in zip(held, on_ranks(3, program), strict=True):
        expected = before[:100] if read is FEWER else np.concatenate([np.zeros(7, np.float32), before])
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("read", [[("a", (50, 2), "float32"), ("c", (3, 1), "float32"), ("d", (1,), "float32")],
                                  [("a", (49, 2), "float32")]], ids=["another layer", "another shape"])
def test_a_state_of_another_model_is_refused(read, tmp_path):
    save(tmp_path / "state")

    def program(transport):
        reducer = make(transport, read)
        with pytest.raises(OptionError, match="of other parameters"):
            gather.load(reducer, 0, tmp_path / "state")
        assert not reducer.read_residual().any()

    on_ranks(3, program)


@pytest.mark.parametrize("values", [
    np.zeros(102, np.float32), np.zeros((103, 1), np.float32), np.zeros(103, np.int32),
    np.full(103, np.nan, np.float32), np.full(103, 1e300)],
                         ids=["short", "shape", "integers", "nan", "overflow"])
def test_a_residual_that_does_not_fit_is_refused_and_nobody_takes_anything(values, tmp_path):
    save(tmp_path / "state")
    replace_residual(tmp_path / "state", 2, values)
    assert "the residual of rank 2" in refused(tmp_path / "state")


@pytest.mark.parametrize(("change", "words"), [
    (lambda c: c["reductions"][0][1].pop("unit"), "a record has no 'unit'"),
    (lambda c: c["reductions"][0][1].update(algorithm=3), "'algorithm' is 3"),
    (lambda c: c["reductions"][0][1].update(level=-1), "'level' is -1"),
    (lambda c: c["reductions"][0][1].update(coefficient=-1.0), "'coefficient' is -1.0"),
    (lambda c: c["reductions"][0][1].update(coefficient=float("nan")), "'coefficient' is nan"),
    (lambda c: c["reductions"][0][1].update(steps=None), "'steps' is None"),
    (lambda c: c["reductions"][0][1].update(size=0), "'size' is 0"),
    (lambda c: c["reductions"][0][1].update(copies=0), "'copies' is 0"),
    (lambda c: c["reductions"][0][1].update(noise={"steps": "x"}), "'noise' is {'steps': 'x'}"),
    (lambda c: c["reductions"][0][1]["algorithm"].update(boundaries=[[0], [1, 2]]), "the regions' boundaries are"),
    (lambda c: c["reductions"][0][1]["algorithm"].update(boundaries=[0, 90, 70, 103]), "the regions' boundaries are"),
    (lambda c: c["reductions"][0][1]["algorithm"].update(boundaries=[5, 70, 90, 103]), "the regions' boundaries are"),
    (lambda c: c["reductions"][0][1]["algorithm"].update(boundaries=[]), "the regions' boundaries are"),
    (lambda c: c["reductions"][0][1]["algorithm"].update(boundaries=[0, 10**30]), "the regions' boundaries are"),
    (lambda c: c["reductions"][0][1]["algorithm"].update(global_threshold=[]), "the threshold is []"),
    (lambda c: c["reductions"][0][1]["algorithm"].update(turns={}), "the turns of its blocks are {}"),
    (lambda c: c["reductions"][0][1].update(parameters={}), "'parameters' is"),
    (lambda c: c["reductions"][0].__setitem__(1, []), "expected a record; got list"),
    (lambda c: c["reductions"].__setitem__(0, {}), "expected a list of records; got dict"),
    (lambda c: c["reductions"].__setitem__(0, []), "has no records"),
    (lambda c: c.pop("optimizers"), "KeyError: 'optimizers'"),
    (lambda c: c.pop("version"), "the file has no version"),
    (lambda c: c.update(version=7), "of version 7"),
    (lambda c: [c], "the file has no version"),
])
def test_records_that_are_damaged_are_named(change, words, tmp_path):
    save(tmp_path / "state")
    change_records(tmp_path / "state", change)
    assert words in refused(tmp_path / "state")


def test_wherever_a_bit_is_flipped_the_file_is_as_before_or_refused(tmp_path):
    held, path = save(tmp_path / "state", 1)[0], tmp_path / "state"
    whole, refusals = path.read_bytes(), 0

    def program(transport):
        reducer = make(transport)
        try:
            gather.load(reducer, 0, path)
        except OptionError:
            return None
        return reducer.read_residual()

    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        found = on_ranks(1, program)[0]
        assert found is None or np.array_equal(found, held), place
        refusals += found is None
    assert refusals > len(whole) // 14


def test_a_reduction_that_the_file_does_not_have_stays_as_it_is_and_others_find_their_own(tmp_path):
    def before(transport):
        reducers = [trained(transport, 3), trained(transport, 3, OTHERS)]
        gather.save(reducers, tmp_path / "both")
        gather.save(reducers[:1], tmp_path / "one")
        return [reducer.read_residual() for reducer in reducers]

    def after(transport):
        taken: set[int] = set()
        found = [make(transport, OTHERS), make(transport)]  # in another order
        for index, reducer in enumerate(found):
            gather.load(reducer, index, tmp_path / "both", taken=taken)
        late, taken = make(transport, OTHERS), set()
        gather.load(make(transport), 0, tmp_path / "one", taken=taken)
        gather.load(late, 1, tmp_path / "one", taken=taken)
        assert not late.read_residual().any()
        return [reducer.read_residual() for reducer in reversed(found)]

    held = on_ranks(2, before)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = on_ranks(2, after)
    assert [str(w.message) for w in caught if "has no state for the parameters that begin with 'c'" in str(w.message)]
    for mine, theirs in zip(held, found, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
