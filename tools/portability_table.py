"""The portability report for reading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GIB = 1 << 30


def table(report: dict[str, Any]) -> str:
    """A line per model, plan and target; then what failed, what does not fit and what was skipped, by name."""
    lines = [
        f"{'model':14} {'plan':11} {'attention':13} {'target':6} {'graphs':>7} {'planned':>9} {'compiled':>9} "
        f"{'temp':>7} {'weights':>8} {'of':>6} {'buffers':>8} {'launches':>8} {'seconds':>7}  status"
    ]
    lines += [_line(row) for row in report["rows"]]
    lines += [
        "",
        "GiB on one device; graphs that passed of all; command buffers of all graphs and launches of the segment "
        "(GPU); seconds of compiling what no row above had",
    ]
    lines += [line for row in report["rows"] for line in details(row)]
    lines += [f"{name}: {reason}" for name, reason in report["skipped"].items()]
    lines += [f"note: {note}" for note in report["notes"]]
    counts = report["counts"]
    lines.append(", ".join(f"{count} {status}" for status, count in counts.items()))
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    memory = "-" if row["device_memory"] is None else f"{row['device_memory'] / GIB:.0f}"
    seconds = sum(g["compile_s"] or 0 for g in row["graphs"])
    return (
        f"{row['model']:14} {row['plan']:11} {row['attention']:13} {row['target']:6} "
        f"{good_graphs(row):>7} "
        f"{gib(row['planned'], '9.3f')} {gib(row['compiled'], '9.3f')} {gib(row['temporaries'], '7.3f')} "
        f"{gib(row['weights'], '8.3f')} {memory:>6} {of_graphs(row, 'command_buffers'):>8} "
        f"{of_graphs(row, 'launches', 'segment'):>8} {seconds:7.1f}  {row['status']}"
        + ("" if row["fits"] else "; does not fit one device")
    )


def good_graphs(row: dict[str, Any]) -> str:
    """Graphs of a row that were compiled and passed every check, of all."""
    graphs = row["graphs"]
    return f"{sum(not g['failures'] and g['arguments'] is not None for g in graphs)}/{len(graphs)}"


def of_graphs(row: dict[str, Any], field: str, name: str = "") -> str:
    """The sum of a field over a row's graphs, or those of one name; "-" where nothing has it."""
    values = [g[field] for g in row["graphs"] if g["name"].startswith(name) and g[field] is not None]
    return str(sum(values)) if values else "-"


def details(row: dict[str, Any]) -> Iterator[str]:
    """What failed of a row, and what was too large, a line each."""
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


def gib(value: int | None, form: str) -> str:
    """Bytes as GiB in a format such as "9.3f"; "-" for none."""
    return "-".rjust(int(form.split(".")[0])) if value is None else f"{value / GIB:{form}}"
