"""The portability report for reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GIB = 1 << 30


def table(report: dict[str, Any]) -> str:
    """A line per model, plan and target; then what failed, what does not fit and what was skipped, by name."""
    lines = [
        f"{'model':14} {'plan':11} {'target':6} {'graphs':>7} {'planned':>9} {'compiled':>9} {'temp':>7} "
        f"{'weights':>8} {'of':>6} {'buffers':>8} {'launches':>8} {'seconds':>7}  status"
    ]
    lines += [_line(row) for row in report["rows"]]
    lines += [
        "",
        "GiB on one device; graphs that passed of all; command buffers and launches per graph set (GPU)",
    ]
    lines += [line for row in report["rows"] for line in _details(row)]
    lines += [f"{name}: {reason}" for name, reason in report["skipped"].items()]
    lines += [f"note: {note}" for note in report["notes"]]
    counts = report["counts"]
    lines.append(", ".join(f"{count} {status}" for status, count in counts.items()))
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    graphs = row["graphs"]
    good = sum(not g["failures"] and g["arguments"] is not None for g in graphs)
    buffers = [g["command_buffers"] for g in graphs if g["command_buffers"] is not None]
    launches = [g["launches"] for g in graphs if g["launches"] is not None]
    memory = "-" if row["device_memory"] is None else f"{row['device_memory'] / GIB:.0f}"
    seconds = sum(g["compile_s"] or 0 for g in graphs)
    return (
        f"{row['model']:14} {row['plan']:11} {row['target']:6} {f'{good}/{len(graphs)}':>7} "
        f"{_gib(row['planned'], '9.3f')} {_gib(row['compiled'], '9.3f')} {_gib(row['temporaries'], '7.3f')} "
        f"{_gib(row['weights'], '8.3f')} {memory:>6} {sum(buffers) if buffers else '-':>8} "
        f"{sum(launches) if launches else '-':>8} {seconds:7.1f}  {row['status']}"
        + ("" if row["fits"] else "; does not fit one device")
    )


def _details(row: dict[str, Any]) -> Iterator[str]:
    where = f"{row['model']} {row['plan']} {row['target']}"
    for problem in row["failures"]:
        yield f"FAILED {where}: {problem}"
    same: dict[str, list[str]] = {}
    for graph in row["graphs"]:
        for problem in graph["failures"]:
            same.setdefault(problem, []).append(graph["name"])
        if graph["too_large"]:
            yield f"too large {where} {graph['name']}: {graph['too_large']}"
    for problem, graphs in same.items():
        yield f"FAILED {where} {', '.join(graphs)}: {problem}"


def _gib(value: int | None, form: str) -> str:
    return "-".rjust(int(form.split(".")[0])) if value is None else f"{value / GIB:{form}}"
