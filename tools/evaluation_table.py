"""The report of `evaluate.py` for reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown tables under a line that says what they show."""
    return _text_table(report) if report["task"] == "text" else _needle_tables(report)


def _text_table(report: Mapping[str, Any]) -> str:
    resident = _value(report, "resident_perplexity", 1, ".3f")
    lines = [
        f"{report['model']} {report['dtype']}, {len(report['rows'])} rows × {report['tokens']} tokens after "
        f"{report['context']} of {', '.join(report['texts'])}; perplexity of resident {resident}; intervals: "
        f"{report['interval']}",
        "",
        "| plan | KV in memory, MB | of full KV | KL to resident | same top-1, % | perplexity | reuse, % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["plans"]:
        cells = [
            *_plan(row),
            _value(row, "kl", 1, ".4f"),
            _value(row, "top1", 100, ".1f"),
            _value(row, "perplexity", 1, ".3f"),
            _reuse(row),
        ]
        lines.append(_row(cells))
    lines += [_row([name, "–", "–", f"not run: {why}", "", "", ""]) for name, why in report["unfit"].items()]
    return "\n".join(lines)


def _needle_tables(report: Mapping[str, Any]) -> str:
    lines = [
        f"{report['model']} {report['dtype']}, {report['questions']} questions of each kind and length in "
        f"{', '.join(report['texts'])}, seed {report['seed']}, {report['form']} form; of resident: the share of its "
        f"score that is left where that is not 0; lost, gained: questions answered worse, better; intervals: "
        f"{report['interval']}",
        "",
        "| kind | tokens | plan | KV in memory, MB | of full KV | score of resident, % | score, % | of resident, % | "
        "lost | gained | reuse, % |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in report["cells"]:
        where = [cell["kind"], str(cell["length"])]
        resident = _value(cell["resident"], "score", 100, ".1f")
        for row in cell["plans"]:
            left = _value(row, "relative", 100, ".1f") if cell["resident"]["can"] else "resident cannot do it"
            counts = [str(row["lost"]), str(row["gained"])]
            cells = [*where, *_plan(row), resident, _value(row, "score", 100, ".1f"), left, *counts]
            lines.append(_row([*cells, _reuse(row)]))
        lines += [
            _row([*where, name, "–", "–", resident, f"not run: {why}", "", "", "", ""])
            for name, why in cell["unfit"].items()
        ]
    lines += [
        "",
        f"Mean over the kinds and lengths that resident can do (a score of {100 * report['resident_can']:.0f} % or "
        "more):",
        "",
        "| plan | of full KV | of resident, % | kinds × lengths |",
        "|---|---|---|---|",
    ]
    for row in report["summary"]:
        memory = "–" if row["memory_fraction"] is None else f"{100 * row['memory_fraction']:.1f} %"
        left = "–" if row["relative"] is None else _value(row, "relative", 100, ".1f")
        lines.append(_row([row["name"], memory, left, f"{row['cells']} of {len(report['cells'])}"]))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plan(row: Mapping[str, Any]) -> list[str]:
    held = row["kv_bytes"]["device"] + row["kv_bytes"]["dram"]
    return [row["name"], f"{held / 1e6:.1f}", f"{100 * row['memory_fraction']:.1f} %"]


def _value(row: Mapping[str, Any], name: str, unit: float, form: str) -> str:
    """A number with its interval, which may be none."""
    bounds = row[f"{name}_interval"]
    ends = "" if bounds is None else f" ({bounds[0] * unit:{form}}–{bounds[1] * unit:{form}})"
    return f"{row[name] * unit:{form}}{ends}"


def _reuse(row: Mapping[str, Any]) -> str:
    return "–" if row["reuse_rate"] is None else f"{100 * row['reuse_rate']:.1f}"
