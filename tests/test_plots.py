"""Plots: what they show, in a terminal and as files, and what they refuse."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax import TierError, UsageError

SERIES = {
    "resident": [(8192.0, 31.0, 30.0, 31.0), (1024.0, 80.0, 79.0, 80.0)],
    "group disk": [(1024.0, 90.0, 90.0, 90.0), (8192.0, 65.0, 65.0, 65.0)],
}


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    return importlib.import_module("plots")


def test_a_terminal_shows_every_point_where_it_is(plots: ModuleType) -> None:
    lines = plots.terminal_plot("tok/s", SERIES, width=40, height=12, logx=True).splitlines()
    assert lines[0] == "tok/s"
    area = [line[5:].ljust(35) for line in lines[1:13]]  # 0 at the bottom, 100 on top
    assert [line.split("+")[0].strip() for line in lines[1:13] if "+" in line] == ["100", "50", "0"]
    assert [(i, row[0]) for i, row in enumerate(area) if row[0] in "ox"] == [(1, "x"), (2, "o")]
    assert [(i, row[-1]) for i, row in enumerate(area) if row[-1] in "ox"] == [(4, "x"), (8, "o")]
    assert lines[-2].split() == ["1,024", "8,192"]
    assert lines[-1] == "o resident   x group disk"


def test_marks_on_one_another_are_said(plots: ModuleType) -> None:
    text = plots.terminal_plot("t", {"a": [(1, 1, 1, 1)], "b": [(1, 1, 1, 1)]})
    assert "% several" in text
    assert "% several" not in plots.terminal_plot("t", {"a": [(1, 1, 1, 1)], "b": [(1, 9, 9, 9)]})


points = st.lists(
    st.tuples(*[st.floats(-1e6, 1e6).filter(lambda v: v == 0 or abs(v) > 1e-6)] * 2), min_size=1, max_size=6
)


@settings(max_examples=40, deadline=None)
@given(st.lists(points, min_size=1, max_size=12), st.integers(40, 100), st.integers(4, 30))
def test_a_terminal_plot_fits_its_size(
    lines: list[list[tuple[float, float]]], width: int, height: int
) -> None:
    plots = importlib.import_module("plots")
    series = {f"s{i}": [(x, y, y, y) for x, y in line] for i, line in enumerate(lines)}
    text = plots.terminal_plot("title", series, width, height).splitlines()
    assert max(map(len, text)) <= width
    assert sum("|" in line or "+" in line for line in text) >= height
    marks = sum(any(mark in line[8:] for mark in "ox+*#@&$=~%") for line in text[1 : 1 + height])
    assert marks >= 1


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-1e9, 1e9).filter(lambda v: v == 0 or abs(v) > 1e-9), min_size=1), st.integers(2, 8)
)
def test_ticks_are_round_and_around_the_values(values: list[float], most: int) -> None:
    ticks = importlib.import_module("plots")._ticks(values, most)
    step = ticks[1] - ticks[0]
    slack = 1e-6 * step
    assert ticks[0] <= min(values) + slack
    assert max(values) - slack <= ticks[-1]
    assert 2 <= len(ticks) <= most + 3
    factor = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert min(abs(factor - round_one) for round_one in (1, 2, 5, 10)) < 1e-3


def test_files(plots: ModuleType, tmp_path: Path) -> None:
    plots.line_plot(tmp_path / "line.png", "t", "x", "y", SERIES, logx=True)
    plots.bar_plot(tmp_path / "bar.png", "t", "y", {"batch 1": {"a": 1.0}, "batch 8": {"a": 2.0, "b": 3.0}})
    for name in ("line.png", "bar.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(TierError, match="choose another place for plots"):
        plots.line_plot(tmp_path / "none" / "x.png", "t", "x", "y", SERIES)
    for nothing in ({}, {"a": []}):
        with pytest.raises(ValueError, match="nothing to plot"):
            plots.line_plot(tmp_path / "x.png", "t", "x", "y", nothing)
        with pytest.raises(ValueError, match="nothing to plot"):
            plots.terminal_plot("t", nothing)
    with pytest.raises(ValueError, match="40 columns and 4 rows, not 10 x 16"):
        plots.terminal_plot("t", SERIES, width=10)


def test_without_matplotlib(plots: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r'pip install "swapkv-jax\[plots\]"'):
        plots.need_matplotlib()
    assert "resident" in plots.terminal_plot("t", SERIES)
