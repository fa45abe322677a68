"""A benchmark's report as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]
NONE = "–"


def tables(report: dict[str, Any]) -> str:
    """The machine; tables of speed, of memory and reads, of what a step consists of, and of the peers' settings; how
    policy `group` grows; who was skipped."""
    facts, rows = report["machine"], report["rows"]
    disk = facts["disk_bytes_per_s"]
    heading = [
        f"{facts['cpu']}, {facts['cores']} cores; memory {facts['memory_bytes_per_s'] / 1e9:.1f} GB/s"
        + (f", disk {disk / 1e9:.2f} GB/s" if disk else "")
        + f"; jax {facts['jax']}, {facts['date']}",
        f"{report['model']}, {report['dtype']}; prompt of {report['prompt']}, {report['prefill']} prefill; "
        f"{report['steps']} steps in turns of {report['burst']} after {report['warm_up']}"
        + (", the text's own tokens" if report["forced"] else "")
        + (
            f"; policies that select get {report['kv_memory']:.4f} of the whole KV"
            if report["kv_memory"]
            else ""
        ),
    ]
    profiled = [row for row in rows if row["breakdown"] is not None]
    parts = [
        "\n".join(heading),
        _table(_speed_columns(rows, report["dtype"]), rows),
        _table(_where(rows) + _MEMORY, rows),
        _table(_where(rows) + _BREAKDOWN, profiled) if profiled else "",
        _table(_where(report["trials"]) + _TRIALS, report["trials"]) if report["trials"] else "",
        "\n".join([*_growth(report), *(f"note: {note}" for note in report["notes"])]),
        "\n".join(f"{name}: {reason}" for name, reason in report["skipped"].items()),
    ]
    return "\n\n".join(part for part in parts if part)


def label(row: Row) -> str:
    """A row's name, and its tier where it has one; a peer's has its setting."""
    return " ".join(filter(None, (row["name"], row["tier"])))


def shape_of(row: Row) -> tuple[int, int, str]:
    """What rows must have in common to be compared."""
    return row["context"], row["batch"], row["storage_profile"]


def best_peer(rows: Sequence[Row], row: Row, dtype: str) -> Row | None:
    """The fastest peer of that precision in the rounds that `row` was in."""
    others = [r for r in rows if r["peer"] and r["precision"] == dtype and shape_of(r) == shape_of(row)]
    return min(others, key=lambda other: other["tpot_s"], default=None)


# ---- columns -------------------------------------------------------------------------------------------


def _where(rows: Sequence[Row]) -> list[Column]:
    """Which rounds a row was in; the disk where there are several."""
    columns: list[Column] = [("context", lambda r: str(r["context"])), ("batch", lambda r: str(r["batch"]))]
    if any("storage_profile" in row for row in rows):
        columns.append(("disk", lambda r: r["storage_profile"]))
    return [*columns, ("", label)]


def _speed_columns(rows: Sequence[Row], dtype: str) -> list[Column]:
    first: dict[tuple[int, int, str], str] = {}
    for row in rows:
        first.setdefault(shape_of(row), label(row))
    fastest = {  # of each peer, in its rounds
        (*shape_of(row), row["peer"]): row["name"]
        for row in sorted((r for r in rows if r["peer"]), key=lambda r: -r["tpot_s"])
    }

    def times_as_fast(row: Row, other: str | None) -> str:
        ratio = row["ratio_to"].get(other)
        return NONE if ratio is None else f"{1 / ratio:.2f}"

    def over_peer(row: Row) -> str:
        peer = best_peer(rows, row, dtype)
        return NONE if peer is None else times_as_fast(row, peer["name"])

    def name(row: Row) -> str:
        marked = row["peer"] and fastest[*shape_of(row), row["peer"]] == row["name"]
        return label(row) + (" (its fastest)" if marked else "")

    compared = dict.fromkeys(first.values())
    columns: list[Column] = [
        *_where(rows)[:-1],
        ("", name),
        ("KV in", lambda r: r["kv_dtype"]),
        ("tok/s", _number("tokens_per_s", ".1f")),
        ("ms/step", _number("tpot_s", ".1f", 1e3)),
        ("p90", _number("tpot_p90_s", ".1f", 1e3)),
        (f"x {', '.join(compared)}", lambda r: times_as_fast(r, first[shape_of(r)])),
    ]
    if fastest:
        columns.append(("x best peer of our precision", over_peer))
    return [
        *columns,
        ("floor, ms", _number("floor_s", ".1f", 1e3)),
        ("x floor", _number("over_floor", ".2f")),
        ("first token, s", _number("ttft_s", ".2f")),
        ("load", lambda r: f"{r['load'][1]:.1f}"),
    ]


def _number(key: str, form: str, unit: float = 1.0) -> Callable[[Row], str]:
    """A cell of `key`, a path of names with dots."""

    def cell(row: Row) -> str:
        value: Any = row
        for name in key.split("."):
            value = value[name]
        return NONE if value is None else f"{value * unit:{form}}"

    return cell


_MEMORY: list[Column] = [
    ("device, MB", _number("kv_bytes.device", ".1f", 1e-6)),
    ("DRAM, MB", _number("kv_bytes.dram", ".1f", 1e-6)),
    ("disk, MB", _number("kv_bytes.disk", ".1f", 1e-6)),
    ("of whole KV", _number("memory_fraction", ".3f")),
    ("groups", _number("groups_selected_per_step", ".0f")),
    ("of them read", _number("groups_read_per_step", ".0f")),
    ("reuse", _number("reuse_rate", ".3f")),
    ("read, MB", _number("bytes_read_per_step", ".1f", 1e-6)),
    ("between turns", _number("read_between_fraction", ".3f")),
    ("MB/s", _number("disk_bytes_per_s", ".0f", 1e-6)),
    ("x plain reader", _number("ratio_to_plain_reader", ".2f")),
    ("random, MB/s", _number("random_reader_bytes_per_s", ".0f", 1e-6)),
    ("wait", _number("wait_fraction", ".3f")),
    ("hidden", _number("hidden_fraction", ".3f")),
    ("overflow", _number("overflow_loads", ".0f")),
    ("scan, ms", _number("scan_s", ".1f", 1e3)),
    ("floor of memory, ms", _number("floor_memory_s", ".1f", 1e3)),
    ("of disk, ms", _number("floor_disk_s", ".1f", 1e3)),
]
_BREAKDOWN: list[Column] = [
    ("profiled ms/step", _number("breakdown.step_s", ".1f", 1e3)),
    *(
        (part, _number(f"breakdown.{part}", ".1f", 1e3))
        for part in ("compute", "predict", "transfer", "wait", "host")
    ),
]
_TRIALS: list[Column] = [
    ("trial, ms/step", _number("tpot_s", ".1f", 1e3)),
    ("tok/s", _number("tokens_per_s", ".1f")),
    ("steps", _number("steps", ".0f")),
    ("KV, MB", _number("kv_bytes.device", ".1f", 1e-6)),
    ("first token, s", _number("ttft_s", ".2f")),
    ("", lambda r: "takes part" if r["taken"] else ""),
]


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Columns that say nothing of any row are left out."""
    cells = [[cell(row) for row in rows] for _, cell in columns]
    said = [i for i, column in enumerate(cells) if any(cell != NONE for cell in column)]
    lines = [[columns[i][0] for i in said], ["---"] * len(said)]
    lines += [[cells[i][row] for i in said] for row in range(len(rows))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _growth(report: dict[str, Any]) -> list[str]:
    lines = [
        f"{label(grown)}, batch {grown['batch']}, disk {grown['storage_profile']}, context "
        f"{' to '.join(map(str, grown['contexts']))}: step {grown['step_s'] * 1e3:+.1f} ms; the summary's scan alone "
        f"{grown['scan_s'] * 1e3:+.1f} ms, its bytes at memory bandwidth {grown['scan_floor_s'] * 1e3:+.1f} ms"
        for grown in report["growth"]
    ]
    if any(row["random_reader_bytes_per_s"] for row in report["rows"]):
        lines.append(f"random, MB/s: {report['random_reader']}")
    return lines
