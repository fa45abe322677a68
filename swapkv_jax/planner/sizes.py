"""Sizes, rates and times as a user writes them."""

from __future__ import annotations

import math

from swapkv_jax.errors import UsageError

_BYTES = {"": 1, "b": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for kind, base in (("b", 1000), ("ib", 1024))
}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
_UNITS = "units are B, KB to PB (powers of 1000) and KiB to PiB (of 1024)"
_SIZE = "write it like 512MiB, 2GB or 1073741824"
_RATE = "write it like 56GB/s, 25GiBps or 56000000000"
_TIME = "write it like 200ms or 0.2s"


def parse_size(text: str) -> int:
    """Bytes from "512MiB", "2GB", "1.5 GiB" or a plain number: MiB and its kind are powers of 1024, MB of 1000.

    Raises:
      UsageError: it is not a size of at least one byte.
    """
    value = _parse(text, _BYTES)
    if value is None:
        raise UsageError(f"{text!r} is not a size; {_SIZE}; {_UNITS}")
    if not 1 <= value < 2**63:
        raise UsageError(f"{text!r} must be at least 1 byte and less than 2^63 (8192 PiB); {_SIZE}")
    return int(value)


def parse_rate(text: str) -> int:
    """Bytes per second from "56GB/s", "56GBps" or what `parse_size` takes.

    Raises:
      UsageError: it is not a rate of at least one byte per second.
    """
    number = text.strip().lower()
    value = _parse(number.removesuffix("/s").removesuffix("ps"), _BYTES)
    if value is None:
        raise UsageError(f"{text!r} is not a rate; {_RATE}; {_UNITS}, a second")
    if not 1 <= value < 2**63:
        raise UsageError(f"{text!r} must be over 0: at least 1 byte a second and less than 2^63; {_RATE}")
    return int(value)


def parse_seconds(text: str) -> float:
    """Seconds from "200ms", "0.2s" or a plain number of seconds.

    Raises:
      UsageError: it is not a time above zero.
    """
    value = _parse(text, _SECONDS)
    if value is None:
        raise UsageError(f"{text!r} is not a time; {_TIME}; units are s, ms and us")
    if not 0 < value < math.inf:
        raise UsageError(f"{text!r} must be over 0 and finite; {_TIME}")
    return value


def _parse(text: str, units: dict[str, int] | dict[str, float]) -> float | None:
    number, unit = text.strip().lower(), ""
    while number and number[-1].isalpha():
        number, unit = number[:-1], number[-1] + unit
    try:
        return float(number) * units[unit]
    except (ValueError, KeyError):
        return None
