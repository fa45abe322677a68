"""What is lost at which memory, from the report of `evaluate.py`: as PNG files and for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plots import Point, line_plot, terminal_plot

_MEMORY = "KV in memory, % of the whole cache"


class _Plot(NamedTuple):
    stem: str
    title: str
    label: str
    series: dict[str, list[Point]]


def plot_report(report: Mapping[str, Any], directory: Path) -> list[Path]:
    """Writes the report's plots into `directory`, which is there; returns their paths.

    Raises:
      UsageError: no matplotlib. TierError: a file cannot be written.
    """
    paths = []
    for plot in _plots(report):
        path = directory / f"{plot.stem}.png"
        line_plot(path, plot.title, _MEMORY, plot.label, plot.series)
        paths.append(path)
    return paths


def terminal_plots(report: Mapping[str, Any]) -> str:
    """The report's plots in characters; nothing for a single plan, which a table shows as well."""
    return "\n\n".join(
        terminal_plot(f"{plot.label} against {_MEMORY}", plot.series)
        for plot in _plots(report)
        if sum(map(len, plot.series.values())) > 1
    )


def _plots(report: Mapping[str, Any]) -> Iterator[_Plot]:
    """Those with something to show."""
    about = f"{report['model']} {report['dtype']}"
    if report["task"] == "text":
        about += f", {report['tokens']} tokens after {report['context']}"
        rows = report["plans"]
        yield _Plot("kl_memory", about, "KL to resident, nats", _series(rows, "kl", 1))
        yield _Plot("top1_memory", about, "same top-1 token as resident, %", _series(rows, "top1", 100))
        return
    rows = [row for row in report["summary"] if row["relative"] is not None]
    if rows:
        lengths = sorted({cell["length"] for cell in report["cells"] if cell["resident"]["can"]})
        about += f", prompts of {', '.join(map(str, lengths))} tokens"
        yield _Plot("score_memory", about, "score, % of resident's", _series(rows, "relative", 100))


def _series(rows: Sequence[Mapping[str, Any]], name: str, unit: float) -> dict[str, list[Point]]:
    """A line per strategy, whose plans differ in memory; plans that select nothing have one each."""
    series: dict[str, list[Point]] = {}
    for row in rows:
        low, high = row[f"{name}_interval"] or (row[name], row[name])
        point = (100 * row["memory_fraction"], row[name] * unit, low * unit, high * unit)
        strategy = row["strategy"] or row["name"]
        series.setdefault("group" if strategy == "kvswap" else strategy, []).append(point)
    return series
