"""A benchmark's report for reading."""

from __future__ import annotations

from typing import Any


def table(report: dict[str, Any]) -> str:
    """The machine, a line per contender, another per one of policy `group`, its growth, and who was skipped."""
    facts = report["machine"]
    disk = facts["disk_bytes_per_s"]
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores; memory {facts['memory_bytes_per_s'] / 1e9:.1f} GB/s"
        + (f", disk {disk / 1e9:.2f} GB/s" if disk else "")
        + f"; jax {facts['jax']}",
        f"{report['model']}; prompt of {report['prompt']}, {report['prefill']} prefill; {report['steps']} steps"
        + f" in turns of {report['burst']}"
        + (", the text's own tokens" if report["forced"] else ""),
        f"{'':12} {'context':>7} {'batch':>5} {'ms/step':>8} {'p90':>8} {'floor':>7} {'tok/s':>7} "
        f"{'x first':>8} {'wait':>5} {'read MB':>8} {'x plain':>7} {'device MB':>9} {'DRAM MB':>8} {'of full':>7} "
        f"{'load':>5}",
    ]
    first: dict[tuple[int, int], str] = {}
    for row in report["rows"]:
        reference = first.setdefault((row["context"], row["batch"]), _label(row))
        lines.append(
            f"{_label(row):12} {row['context']:7} {row['batch']:5} {row['tpot_s'] * 1e3:8.1f} "
            f"{row['tpot_p90_s'] * 1e3:8.1f} {row['floor_s'] * 1e3:7.1f} {row['tokens_per_s']:7.1f} "
            f"{_cell(row['ratio_to'].get(reference), '8.3f')} {_cell(row['wait_fraction'], '5.2f')} "
            f"{_cell(row['bytes_read_per_step'], '8.1f', 1e6)} {_cell(row['ratio_to_plain_reader'], '7.2f')} "
            f"{row['kv_bytes']['device'] / 1e6:9.1f} {row['kv_bytes']['dram'] / 1e6:8.1f} "
            f"{_cell(row['memory_fraction'], '7.3f')} {row['load'][1]:5.1f}"
        )
    lines += _group_lines(report)
    lines += [f"{name}: {reason}" for name, reason in report["skipped"].items()]
    return "\n".join(lines)


def _group_lines(report: dict[str, Any]) -> list[str]:
    rows = [row for row in report["rows"] if row["policy"] == "group"]
    if not rows:
        return []
    lines = [
        "",
        f"{'':12} {'context':>7} {'batch':>5} {'selected':>8} {'read':>7} {'reuse':>6} {'hidden':>6} {'between':>7} "
        f"{'overflow':>8} {'disk MB/s':>9} {'random':>7} {'memory floor':>12} {'disk floor':>10} {'scan ms':>8}",
    ]
    lines += [
        f"{_label(row):12} {row['context']:7} {row['batch']:5} {row['groups_selected_per_step']:8.0f} "
        f"{row['groups_read_per_step']:7.0f} {_cell(row['reuse_rate'], '6.3f')} "
        f"{_cell(row['hidden_fraction'], '6.3f')} {_cell(row['read_between_fraction'], '7.3f')} "
        f"{row['overflow_loads']:8} {_cell(row['disk_bytes_per_s'], '9.0f', 1e6)} "
        f"{_cell(row['random_reader_bytes_per_s'], '7.0f', 1e6)} {row['floor_memory_s'] * 1e3:12.1f} "
        f"{row['floor_disk_s'] * 1e3:10.1f} {row['scan_s'] * 1e3:8.1f}"
        for row in rows
    ]
    lines.append(f"random, MB/s: {report['random_reader']}")
    lines += [
        f"{_label(grown)}, batch {grown['batch']}, context {' to '.join(map(str, grown['contexts']))}: step "
        f"{grown['step_s'] * 1e3:+.1f} ms; the summary's scan alone {grown['scan_s'] * 1e3:+.1f} ms, its bytes "
        f"at memory bandwidth {grown['scan_floor_s'] * 1e3:+.1f} ms"
        for grown in report["growth"]
    ]
    lines += [f"note: {note}" for note in report["notes"]]
    return lines


def _label(row: dict[str, Any]) -> str:
    return " ".join(filter(None, (row["name"], row["tier"])))


def _cell(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-".rjust(int(form.split(".")[0])) if value is None else f"{value / unit:{form}}"
