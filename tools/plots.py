"""Plots of what the tools measure: PNG files by matplotlib (extra `plots`), and plain characters for a terminal."""

from __future__ import annotations

import importlib
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swapkv_jax import TierError, UsageError

Point = tuple[float, float, float, float]
"""x, y, and the ends of y's interval; both ends are y itself where there is none."""
Series = Mapping[str, Sequence[Point]]
"""Points by name, in any order."""

_MARKS = "ox+*#@&$=~"
_SEVERAL = "%"  # where marks of several series fall on one another
_LEAST_WIDTH, _LEAST_HEIGHT = 40, 4


def need_matplotlib() -> None:
    """To be called before the work that is to be plotted.

    Raises:
      UsageError: matplotlib is missing or too old.
    """
    _figure()


def line_plot(
    path: Path, title: str, xlabel: str, ylabel: str, series: Series, *, logx: bool = False
) -> None:
    """Writes a PNG with a line per series, and a bar at each point that has an interval. A logarithmic x axis shows
    the points' own x as ticks.

    Raises:
      UsageError: no matplotlib. TierError: `path` cannot be written. ValueError: nothing to plot.
    """
    _some(series)
    figure, axes = _axes(title, xlabel, ylabel)
    for index, (name, points) in enumerate(series.items()):
        x, y, low, high = zip(*sorted(points), strict=True)
        ends = [[at - end for at, end in zip(y, low, strict=True)]]
        ends.append([end - at for at, end in zip(y, high, strict=True)])
        bars = {"yerr": ends, "capsize": 3} if any(map(any, ends)) else {}
        axes.errorbar(x, y, marker="osD^vP*X"[index % 8], label=name, **bars)
    if logx:
        ticks = sorted({x for points in series.values() for x, *_ in points})
        axes.set_xscale("log")
        axes.set_xticks(ticks, [_number(tick) for tick in ticks])
        axes.minorticks_off()
    axes.grid(alpha=0.3)
    _save(figure, axes, path)


def bar_plot(path: Path, title: str, ylabel: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Writes a PNG with a bar for each value, {kind: {category: value}}: categories along x, a colour per kind.

    Raises:
      UsageError: no matplotlib. TierError: `path` cannot be written. ValueError: nothing to plot.
    """
    _some(groups)
    figure, axes = _axes(title, "", ylabel)
    categories = list(dict.fromkeys(category for values in groups.values() for category in values))
    share = 0.8 / len(groups)
    for index, (kind, values) in enumerate(groups.items()):
        at = [categories.index(category) + (index - (len(groups) - 1) / 2) * share for category in values]
        axes.bar(at, list(values.values()), share, label=kind)
    axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    axes.grid(axis="y", alpha=0.3)
    _save(figure, axes, path)


def _figure() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise UsageError(
            'plots need matplotlib; pip install "swapkv-jax[plots]", or leave them out'
        ) from None


def _axes(title: str, xlabel: str, ylabel: str) -> tuple[Any, Any]:
    # A figure of its own and no pyplot: nothing is kept between plots, and no display is looked for.
    figure = _figure()(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, axisbelow=True)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise TierError(f"cannot write {path}: {error.strerror}; choose another place for plots") from None


# ---- terminal ------------------------------------------------------------------------------------------


def terminal_plot(
    title: str, series: Series, width: int = 72, height: int = 16, *, logx: bool = False
) -> str:
    """The points as text of at most `width` columns: `height` rows between the axes, a mark per series, dots from
    point to point. Intervals are not shown.

    Raises:
      ValueError: nothing to plot, or no room for it.
    """
    _some(series)
    if width < _LEAST_WIDTH or height < _LEAST_HEIGHT:
        raise ValueError(
            f"a plot needs {_LEAST_WIDTH} columns and {_LEAST_HEIGHT} rows, not {width} x {height}"
        )
    lines = [sorted((math.log(x) if logx else x, y) for x, y, *_ in points) for points in series.values()]
    ticks = _ticks([y for line in lines for _, y in line], most=max(2, height // 4))
    labels = [_number(tick) for tick in ticks]
    margin = max(map(len, labels))
    columns = width - margin - 2
    xs = [x for line in lines for x, _ in line]
    first, last = min(xs), max(xs)

    def column(x: float) -> int:
        return round((x - first) / (last - first) * (columns - 1)) if last > first else (columns - 1) // 2

    def row(y: float) -> int:
        return round((ticks[-1] - y) / (ticks[-1] - ticks[0]) * (height - 1))

    area = [[" "] * columns for _ in range(height)]
    for line in lines:
        for (x0, y0), (x1, y1) in itertools.pairwise(line):
            steps = max(abs(column(x1) - column(x0)), abs(row(y1) - row(y0)), 1)
            for step in range(1, steps):
                share = step / steps
                area[row(y0 + share * (y1 - y0))][column(x0 + share * (x1 - x0))] = "."
    several = False
    for mark, line in zip(_marks(len(lines)), lines, strict=True):
        for x, y in line:
            there = area[row(y)][column(x)]
            several |= there not in (" ", ".", mark)
            area[row(y)][column(x)] = mark if there in (" ", ".", mark) else _SEVERAL
    shown = {row(tick): label for tick, label in zip(ticks, labels, strict=True)}
    sides = [f"{shown.get(i, ''):>{margin}} {'+' if i in shown else '|'}" for i in range(height)]
    ends = [_number(math.exp(x) if logx else x) for x in (first, last)]
    legend = [f"{mark} {name}" for mark, name in zip(_marks(len(lines)), series, strict=True)]
    legend += [f"{_SEVERAL} several"] if several else []
    return "\n".join(
        [
            *textwrap.wrap(title, width),
            *((side + "".join(cells)).rstrip() for side, cells in zip(sides, area, strict=True)),
            " " * (margin + 1) + "+" + "-" * columns,
            " " * (margin + 2) + _between(ends, columns, single=first == last),
            *textwrap.wrap("   ".join(part.replace(" ", "\0") for part in legend), width),
        ]
    ).replace("\0", " ")


def _some(series: Mapping[str, Any]) -> None:
    if not series or not all(series.values()):
        raise ValueError("nothing to plot: every series needs a point")


def _marks(count: int) -> list[str]:
    return [_MARKS[i % len(_MARKS)] for i in range(count)]


def _between(ends: list[str], columns: int, *, single: bool) -> str:
    """The numbers under the x axis."""
    if single:
        return ends[0].center(columns).rstrip()
    return ends[0] + ends[1].rjust(columns - len(ends[0]))


def _ticks(values: Sequence[float], most: int) -> list[float]:
    """Two to `most` + 2 round numbers, evenly apart, around `values`; from zero on where that takes less than half of
    the room."""
    low, high = min(values), max(values)
    if 0 < low < high / 2 or low == high > 0:
        low = 0.0
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / most))
    step = next(unit * factor for factor in (1, 2, 5, 10, 20) if unit * factor * most >= span)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}"
