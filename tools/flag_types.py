"""Types of command-line flags that several tools have."""

from __future__ import annotations

import argparse
from pathlib import Path


def count(text: str) -> int:
    """A positive number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def counts(text: str) -> list[int]:
    """Positive numbers between commas, each once."""
    return list(dict.fromkeys(count(part) for part in text.split(",")))


def paths(text: str) -> list[Path]:
    """Paths between commas."""
    return [Path(part) for part in text.split(",")]
