"""Fixtures of the hosts' tests."""

from tests.schemes.conftest import words_for_indices

__all__ = ["words_for_indices"]
