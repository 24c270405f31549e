"""Spans around phases."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from horovod_oktopk.transport import counting
from horovod_oktopk.transport.counting import CountingTransport
from tests.support.threads import ThreadTransport, ThreadWorld


def test_a_phase_lies_in_every_span_and_spans_end_where_it_fails(monkeypatch):
    monkeypatch.setattr(counting, "_spans", [])
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

    counting.show_phases(span_of("a"))
    counting.show_phases(span_of("b"))
    with pytest.raises(KeyError), CountingTransport(ThreadTransport(ThreadWorld(1), 0)).phase("select"):
        raise KeyError
    assert seen == [(who, what, "oktopk/select") for who, what in
                    (("a", "begin"), ("b", "begin"), ("b", "end"), ("a", "end"))]


@pytest.mark.parametrize(("value", "count"), [("timeline.json", 1), ("DYNAMIC", 0), (None, 0)])
def test_who_asks_for_a_timeline_is_told_once_of_profilers(value, count, monkeypatch, caplog):
    monkeypatch.delenv("HOROVOD_TIMELINE", raising=False)
    if value:
        monkeypatch.setenv("HOROVOD_TIMELINE", value)
    counting.explain_timeline.cache_clear()
    counting.explain_timeline()
    counting.explain_timeline()  # a second reduction of the same process
    assert ["use the framework's profiler" in record.message for record in caplog.records] == [True] * count
