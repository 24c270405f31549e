"""Bandwidths and latencies as users write them, with their units."""

from __future__ import annotations

import re

from ..errors import OptionError

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_bandwidth(text: str) -> float:
    """Bits per second of, say, 10gbit, 940mbit/s or 25Gbps. Raises OptionError, without a unit or in bytes too."""
    return _bandwidth(text, r"(?i:bit(?:/s)?)|b(?:/s|ps)",
                      "a bandwidth in bits with its unit, such as 10gbit, 940mbit/s or 25Gbps")


def parse_memory_bandwidth(text: str) -> float:
    """Bytes per second of, say, 50GB/s. Raises OptionError, without a unit or in bits too."""
    return _bandwidth(text, r"B(?:/s|ps)", "a memory bandwidth in bytes with its unit, such as 50GB/s")


def parse_latency(text: str) -> float:
    """Seconds of, say, 50us, 0.1ms or 5e-5s. Raises OptionError, without a unit too."""
    found = re.fullmatch(r"([0-9.eE+-]+?)\s*(s|ms|us|ns)", text.strip().lower())
    return _positive(text, found and found[1], SECONDS[found[2]] if found else 1.0,
                     "a latency with its unit, such as 50us, 0.1ms or 1e-6s")


def _bandwidth(text: str, unit: str, what: str) -> float:
    """unit: a pattern; b is bits, B is bytes."""
    found = re.fullmatch(rf"([0-9.eE+]+?)\s*([kmgtKMGT]?)(?:{unit})", text.strip())
    return _positive(text, found and found[1], PREFIXES[found[2].lower()] if found else 1.0, what)


def _positive(text: str, number: str | None, unit: float, what: str) -> float:
    try:
        value = float(number or "") * unit
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise OptionError(f"expected {what}; got {text!r}")
    return value
