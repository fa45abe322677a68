"""Command-line flags, and types of them, that several tools have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from swapkv_jax.store_paths import cache_home


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


def nats(text: str) -> float:
    """A positive number of nats."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of nats")
    return value


def add_tables_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--tables` and `--fresh`, of tools that keep the tuner's measurements."""
    parser.add_argument(
        "--tables",
        type=Path,
        default=cache_home() / "swapkv_jax" / "tuner",
        metavar="DIR",
        help="where measurements and prefills are kept (default: in the user's cache)",
    )
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
