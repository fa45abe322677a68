"""Types of command-line flags that several tools have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def count(text: str) -> int:
    """A positive number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def whole(text: str) -> int:
    """A number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def counts(text: str) -> list[int]:
    """Positive numbers between commas, each once."""
    return list(dict.fromkeys(count(part) for part in text.split(",")))


def paths(text: str) -> list[Path]:
    """Paths between commas."""
    return [Path(part) for part in text.split(",")]


def names(what: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type of names between commas, each once, all of them `known`; `what` says what they name."""

    def parse(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
        return list(dict.fromkeys(given))

    return parse
