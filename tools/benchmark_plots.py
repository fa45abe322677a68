"""Plots of a benchmark's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark_table import label
from plots import Point, bar_plot, line_plot, terminal_plot

Row = dict[str, Any]


def plot_files(report: dict[str, Any], directory: Path) -> list[Path]:
    """Writes PNG files into `directory`: for every batch and disk, throughput and memory against context; for every
    context and disk, throughput of each policy by batch.

    Raises:
      UsageError: no matplotlib. TierError: a file cannot be written.
    """
    rows, model = report["rows"], report["model"]
    written = []
    for profile in _each(rows, "storage_profile"):
        for batch in _each(rows, "batch"):
            some = _where(rows, storage_profile=profile, batch=batch)
            about = f"{model}, batch {batch}, disk {profile}"
            for what, title, unit, value in (
                ("throughput", "Throughput", "tokens/s, all rows", _tokens_per_s),
                ("memory", "KV in memory", "MB on the device and in DRAM", _held_megabytes),
            ):
                path = directory / f"{what}-context-b{batch}-{profile}.png"
                line_plot(
                    path,
                    f"{title}: {about}",
                    "context, tokens",
                    unit,
                    _series(some, "context", value),
                    logx=True,
                )
                written.append(path)
        for context in _each(rows, "context"):
            some = _where(rows, storage_profile=profile, context=context)
            groups = {
                f"batch {batch}": {label(row): row["tokens_per_s"] for row in _where(some, batch=batch)}
                for batch in _each(some, "batch")
            }
            path = directory / f"throughput-policies-{context}-{profile}.png"
            title = f"Throughput: {model}, {context} tokens, disk {profile}"
            bar_plot(path, title, "tokens/s, all rows", groups)
            written.append(path)
    return written


def terminal(report: dict[str, Any]) -> str:
    """Throughput against context for every batch and disk, or against batch where there is one context; "" where
    there is one of both."""
    rows = report["rows"]
    plots = []
    axis, other = ("context", "batch") if len(_each(rows, "context")) > 1 else ("batch", "context")
    if len(_each(rows, axis)) > 1:
        for profile in _each(rows, "storage_profile"):
            for value in _each(rows, other):
                some = _where(rows, storage_profile=profile, **{other: value})
                title = f"tokens/s against {axis}, {other} {value}, disk {profile}"
                plots.append(terminal_plot(title, _series(some, axis, _tokens_per_s), logx=True))
    return "\n\n".join(plots)


def _tokens_per_s(row: Row) -> tuple[float, float, float]:
    """The median, and the slowest tenth of the turns below it."""
    low = row["batch"] / row["tpot_p90_s"]
    return row["tokens_per_s"], low, row["tokens_per_s"]


def _held_megabytes(row: Row) -> tuple[float, float, float]:
    held = (row["kv_bytes"]["device"] + row["kv_bytes"]["dram"]) / 1e6
    return held, held, held


def _series(
    rows: Sequence[Row], axis: str, value: Callable[[Row], tuple[float, float, float]]
) -> dict[str, list[Point]]:
    series: dict[str, list[Point]] = {}
    for row in rows:
        series.setdefault(label(row), []).append((row[axis], *value(row)))
    return series


def _each(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _where(rows: Sequence[Row], **values: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in values.items())]
