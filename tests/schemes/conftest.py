"""Fixtures of the schemes' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from horovod_oktopk.vectors import wire


@pytest.fixture(scope="module")
def words_for_indices() -> Iterator[None]:
    """Send an index as a word, as the paper counts."""
    def plain(count: int, _span: int) -> tuple[int, int, int]:
        return 32, count, 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_index_words", plain)
        yield
