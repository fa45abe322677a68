"""The report of `evaluate.py` for reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(report: dict[str, Any]) -> str:
    """The report as a Markdown table under a line that says what it shows."""
    return _text_table(report) if report["task"] == "text" else _needle_table(report)


def _text_table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['model']} {report['dtype']}, {len(report['rows'])} rows × {report['tokens']} tokens after "
        f"{report['context']} of {', '.join(report['texts'])}; perplexity of resident "
        f"{report['resident_perplexity']:.3f}; intervals: {report['interval']}",
        "",
        "| plan | KV in memory, MB | of full KV | KL to resident | same top-1, % | perplexity | reuse, % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["plans"]:
        kl = f"{row['kl']:.4f}{_interval(row['kl_interval'], 1, '.4f')}"
        top1 = f"{100 * row['top1']:.1f}{_interval(row['top1_interval'], 100, '.1f')}"
        reuse = "–" if row["reuse_rate"] is None else f"{100 * row['reuse_rate']:.1f}"
        lines.append(f"| {_plan_cells(row)} | {kl} | {top1} | {row['perplexity']:.3f} | {reuse} |")
    return "\n".join(lines)


def _needle_table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['model']} {report['dtype']}, {report['needles']} needles a length in "
        f"{', '.join(report['texts'])}, seed {report['seed']}, {report['form']} form",
        "",
        "| tokens | plan | KV in memory, MB | of full KV | found by resident | found | lost | gained |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in report["lengths"]:
        lines += [
            f"| {result['length']} | {_plan_cells(row)} | {result['found_by_resident']} | {row['found']} | "
            f"{row['lost']} | {row['gained']} |"
            for row in result["plans"]
        ]
    return "\n".join(lines)


def _plan_cells(row: dict[str, Any]) -> str:
    held = row["kv_bytes"]["device"] + row["kv_bytes"]["dram"]
    return f"{row['name']} | {held / 1e6:.1f} | {100 * row['memory_fraction']:.1f} %"


def _interval(bounds: Sequence[float] | None, unit: float, form: str) -> str:
    return "" if bounds is None else f" ({bounds[0] * unit:{form}}–{bounds[1] * unit:{form}})"
