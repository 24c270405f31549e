"""Spans around phases, and the file beside Horovod's timeline."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager

import pytest

from horovod_oktopk.transport import tracing
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.transport.local import LocalTransport, LocalWorld
from tests.launch import horovodrun


@pytest.fixture(autouse=True)
def only_this_tests_spans(monkeypatch):
    monkeypatch.setattr(tracing, "_spans", [])
    monkeypatch.setattr(tracing, "_timeline", None)


def alone():
    return CountingTransport(LocalTransport(LocalWorld(1), 0))


def test_a_phase_lies_in_every_span_and_spans_end_where_it_fails():
    seen = []

    def span_of(who):
        @contextmanager
        def span(name):
            seen.append((who, "begin", name))
            try:
                yield
            finally:
                seen.append((who, "end", name))
        return span

    tracing.show_phases(span_of("a"))
    tracing.show_phases(span_of("b"))
    with pytest.raises(KeyError), alone().phase("select"):
        raise KeyError
    assert seen == [(who, what, "oktopk/select") for who, what in
                    (("a", "begin"), ("b", "begin"), ("b", "end"), ("a", "end"))]


def begin_timeline(folder, monkeypatch, first):
    """Its path; first: what Horovod has written until then."""
    (folder / "timeline.json").write_text(first)
    monkeypatch.setenv("HOROVOD_TIMELINE", str(folder / "timeline.json"))
    tracing.begin_timeline()
    tracing.begin_timeline()  # a second reduction of the same process
    return folder / "timeline.oktopk.json"


def test_the_timeline_has_the_phases_of_all_threads_on_horovods_clock(tmp_path, monkeypatch):
    first = '[\n{"name": "process_name", "args": {"start_time_since_epoch_in_micros":1000000}},\n'
    path = begin_timeline(tmp_path, monkeypatch, first)
    transport = alone()
    with transport.phase("accumulate"):
        pass

    def in_a_thread():
        with alone().phase("select"), alone().phase("agree"):
            pass

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    tracing._timeline.close()
    with transport.phase("too late"):
        pass
    head, *events = json.loads(path.read_text())
    assert head["args"]["start_time_since_epoch_in_micros"] == 1e6
    assert [(event["name"], event["tid"]) for event in events] == [
        ("oktopk/accumulate", 0), ("oktopk/agree", 1), ("oktopk/select", 1)]
    assert all(event["ph"] == "X" and event["ts"] > 1.7e15 - 1e6 and 0 <= event["dur"] < 1e8 for event in events)
    _, inner, outer = events
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


@pytest.mark.parametrize("first", ["", "[\n", "[\n{\n"])
def test_where_horovods_file_says_nothing_yet_the_timeline_begins_now(first, tmp_path, monkeypatch):
    path = begin_timeline(tmp_path, monkeypatch, first)
    with alone().phase("agree"):
        pass
    tracing._timeline.close()
    _, event = json.loads(path.read_text())
    assert 0 <= event["ts"] < 60e6


@pytest.mark.parametrize("value", [None, "DYNAMIC"])
def test_without_a_file_there_is_no_timeline(value, monkeypatch):
    monkeypatch.delenv("HOROVOD_TIMELINE", raising=False)
    if value:
        monkeypatch.setenv("HOROVOD_TIMELINE", value)
    tracing.begin_timeline()
    assert tracing._timeline is None


def test_a_timeline_that_cannot_be_written_is_told_and_ends_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "no such folder" / "timeline.json"))
    tracing.begin_timeline()
    assert [record.message[:40] for record in caplog.records] == ["no timeline of the phases is written: [E"]
    with alone().phase("agree"):
        pass


@pytest.mark.slow
def test_beside_horovods_timeline_lies_ours_and_they_make_one_picture(tmp_path):
    path = tmp_path / "timeline.json"
    job = horovodrun("mpi", 2, "examples/minimal_pytorch.py", extra={"HOROVOD_TIMELINE": str(path)})
    assert job.returncode == 0, job.output
    theirs, ours = (json.loads(each.read_text()) for each in (path, path.with_suffix(".oktopk.json")))
    phases = [event for event in ours if event["ph"] == "X"]
    assert {"oktopk/accumulate", "oktopk/agree", "oktopk/allgatherv"} <= {event["name"] for event in phases}
    first = min(event["ts"] for event in theirs if "ts" in event)  # the broadcast of the parameters
    last = max(event["ts"] for event in theirs if "ts" in event)  # the barrier at the end
    assert first < phases[0]["ts"] < phases[-1]["ts"] < last
