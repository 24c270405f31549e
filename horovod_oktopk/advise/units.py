"""Bandwidths and latencies as users write them, with their units."""

from __future__ import annotations

import re

from ..errors import OptionError

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_bandwidth(text: str) -> float:
    """Return the bits per second of, say, 10gbit, 940mbit/s or 25Gbps.

    Raise OptionError for any other text, also without a unit or in bytes.
    """
    found = re.fullmatch(r"([0-9.eE+]+?)\s*([kmgtKMGT]?)(?:(?i:bit(?:/s)?)|b(?:/s|ps))", text.strip())
    return _positive(text, found and found[1], PREFIXES[found[2].lower()] if found else 1.0,
                     "a bandwidth in bits with its unit, such as 10gbit, 940mbit/s or 25Gbps")


def parse_latency(text: str) -> float:
    """Return the seconds of, say, 50us, 0.1ms or 5e-5s. Raise OptionError for any other text, also without a unit."""
    found = re.fullmatch(r"([0-9.eE+-]+?)\s*(s|ms|us|ns)", text.strip().lower())
    return _positive(text, found and found[1], SECONDS[found[2]] if found else 1.0,
                     "a latency with its unit, such as 50us, 0.1ms or 1e-6s")


def _positive(text: str, number: str | None, unit: float, what: str) -> float:
    try:
        value = float(number or "") * unit
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise OptionError(f"expected {what}; got {text!r}")
    return value
