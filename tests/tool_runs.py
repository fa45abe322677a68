"""Running a tool's `main` as the command line does, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Outcome(NamedTuple):
    """`report` is what was written as JSON, None where nothing was."""

    code: int
    out: str
    err: str
    report: Any


def run_tool(
    main: Callable[[Sequence[str]], int], flags: Sequence[str], out: Path, capfd: pytest.CaptureFixture[str]
) -> Outcome:
    """Calls `main` with `flags`, which must say to write the report to `out`."""
    try:
        code = main(flags)
    except SystemExit as stop:
        code = int(stop.code or 0)
    text = capfd.readouterr()
    return Outcome(code, text.out, text.err, json.loads(out.read_text()) if out.exists() else None)
