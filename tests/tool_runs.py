"""Running a tool's `main` as the command line does, and what came of it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from engines import compile_once


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


def small_benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/benchmark.py, with little to measure of the machine and graphs that engines share."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    monkeypatch.setattr("swapkv_jax.rates._MEMORY_BYTES", 8 << 20)
    monkeypatch.setattr("swapkv_jax.disk_reads._SEQUENTIAL_BYTES", 2 << 20)
    monkeypatch.setattr("swapkv_jax.engine.compile_program", compile_once)
    monkeypatch.setattr("swapkv_jax.capture.compile_program", compile_once)
    return importlib.import_module("benchmark")
