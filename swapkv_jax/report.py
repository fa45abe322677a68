"""What a decode run reports: the JSON document and its summary for people."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from swapkv_jax.accounting import device_bytes
from swapkv_jax.attention_choice import why_xla
from swapkv_jax.engine import Engine
from swapkv_jax.generation import Generation
from swapkv_jax.memory_limits import exact_bytes, format_bytes
from swapkv_jax.models import Geometry
from swapkv_jax.plan import Plan
from swapkv_jax.planner import describe, weight_bytes
from swapkv_jax.staging import compute_capability
from swapkv_jax.text import RowText


def build_report(
    engine: Engine, generation: Generation, prompts: Sequence[Sequence[int]], rows: Sequence[RowText]
) -> dict[str, Any]:
    """The report as JSON values: times in seconds, sizes in bytes. null is what did not happen.

    `tokens_per_s` counts the tokens of all rows made after the first one, over the time they took.
    """
    plan, geometry, use = engine.plan, engine.model.geometry, engine.use
    memory = plan.memory(geometry)
    attention = None  # of slots, which the exact policies have none of
    if plan.selection is not None:
        attention = {"kind": plan.attention, "why_xla": _why_xla(plan, geometry)}
    device = device_bytes(engine)
    steps = generation.step_s
    later_tokens = sum(len(row.token_ids) for row in rows) - len(rows)
    return {
        "model": engine.model.name,
        "policy": plan.policy,
        "plan": json.loads(plan.to_json()),
        "plan_hash": plan.hash,
        "backend": jax.default_backend(),
        "attention": attention,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "reused_tokens": generation.reused_tokens,
        "generated": [
            {"token_ids": row.token_ids, "text": row.text, "finish_reason": reason}
            for row, reason in zip(rows, generation.finish_reasons, strict=True)
        ],
        "ttft_s": generation.ttft_s,
        "tpot_s": {
            "median": float(np.median(steps)) if steps else None,
            "p90": float(np.quantile(steps, 0.9)) if steps else None,
        },
        "tokens_per_s": later_tokens / sum(steps) if steps else None,
        "compile_s": engine.program.compile_s,
        "compiles_during_decode": generation.compiles_during_decode,
        "memory": {
            "device": {
                "planned": device.planned,
                "compiled": device.compiled,
                "aliased": device.aliased,
                "weights": device.weights,
                "temporaries": device.temporaries,
                "prefill": device.prefill,
            },
            "dram": {"planned": memory.dram, "used": use.dram_used},
            "disk": {"planned": memory.disk, "used": use.disk_used},
            "full_kv": plan.full_kv_bytes,
        },
        "io": {
            "bytes_read": use.bytes_read,
            "bytes_written": use.bytes_written,
            "reads": use.reads,
            "writes": use.writes,
            "retries": use.retries,
            "wait_s": use.wait_s,
            "read_s": use.read_s,
            "hidden_fraction": max(0.0, 1.0 - use.wait_s / use.read_s) if use.read_s else None,
            "groups_selected": use.groups_selected,
            "groups_read": use.groups_read,
            "groups_from_dram": use.groups_from_dram,
            "bytes_from_dram": use.bytes_from_dram,
            "reuse_rate": use.reuse_rate,
            "overflow_loads": use.overflow_loads,
            "summary_bytes": use.summary_bytes,
        },
        "notes": list(use.notes),
    }


def _why_xla(plan: Plan, geometry: Geometry) -> str | None:
    """Why no kernel of the device at hand attends the slots of a `group` plan; None for a kernel, and on a CPU."""
    if plan.selection is None:
        return None
    return why_xla(
        plan.attention,
        jax.default_backend(),
        kv_heads=plan.kv_heads,
        heads=geometry.heads,
        head_dim=plan.head_dim,
        group_tokens=plan.group_tokens,
        dtype=plan.cache_dtype,
        capability=compute_capability(),
    )


def describe_plan(plan: Plan, geometry: Geometry) -> str:
    """The plan and its bytes per tier, a few lines for a person."""
    memory = plan.memory(geometry)
    pooled = (plan.dram_rows or 0) * plan.dram_row_bytes
    rows = f", {format_bytes(pooled)} of it whole rows" if pooled else ""
    shared = f", {format_bytes(memory.aliased)} of it the DRAM pool itself" if memory.aliased else ""
    dtypes = plan.dtype if plan.cache_dtype == plan.dtype else f"{plan.dtype}, KV in {plan.cache_dtype}"
    lines = [
        f"plan {plan.hash}: {describe(plan)}, {plan.batch} row(s) of up to {plan.max_context} tokens, {dtypes}",
        f"  device  {exact_bytes(memory.device + memory.aliased)}{shared}, "
        f"beside {exact_bytes(weight_bytes(geometry, plan.dtype))} of weights",
        f"  DRAM    {exact_bytes(memory.dram)}{rows}",
        f"  disk    {exact_bytes(memory.disk)}",
        f"  (the whole KV cache is {format_bytes(plan.full_kv_bytes)})",
    ]
    if why := _why_xla(plan, geometry):
        lines.insert(1, f"  attention xla: {why}")
    if memory.prefill:
        lines.insert(-3, f"          and {exact_bytes(memory.prefill)} during prefill")
    return "\n".join(lines)


def summarise(report: dict[str, Any]) -> str:
    """Speed and memory per tier, a few lines for a person."""
    memory, io, tpot = report["memory"], report["io"], report["tpot_s"]
    device = memory["device"]
    speed = f"first token after {report['ttft_s']:.2f} s"
    if tpot["median"] is not None:
        speed += (
            f", then {report['tokens_per_s']:.1f} tokens/s "
            f"(step median {tpot['median'] * 1e3:.1f} ms, p90 {tpot['p90'] * 1e3:.1f} ms)"
        )
    shared = f", {format_bytes(device['aliased'])} of it the DRAM pool itself" if device["aliased"] else ""
    lines = [
        f"{sum(report['prompt_tokens'])} prompt tokens, "
        f"{sum(len(row['token_ids']) for row in report['generated'])} new; {speed}",
        f"  device  {format_bytes(device['compiled'])} compiled ({format_bytes(device['planned'])} planned{shared}), "
        f"{format_bytes(device['temporaries'])} temporaries, {format_bytes(device['weights'])} weights",
        f"  DRAM    {format_bytes(memory['dram']['used'])} used of {format_bytes(memory['dram']['planned'])} planned",
        f"  disk    {format_bytes(memory['disk']['used'])} used of {format_bytes(memory['disk']['planned'])} planned",
        f"  whole KV cache {format_bytes(memory['full_kv'])}; compiles during decode: "
        f"{report['compiles_during_decode']}",
    ]
    if io["bytes_read"] or io["bytes_written"]:
        lines.append(
            f"  read {format_bytes(io['bytes_read'])} in {io['reads']} reads, wrote "
            f"{format_bytes(io['bytes_written'])}; waited {io['wait_s']:.2f} s for reads"
        )
    if io["reuse_rate"] is not None:
        lines.append(
            f"  selected {io['groups_selected']} groups, {io['reuse_rate']:.1%} of them still in their slots; "
            f"summary {format_bytes(io['summary_bytes'])}"
        )
    if (attention := report["attention"]) and attention["why_xla"]:
        lines.append(f"  attention xla: {attention['why_xla']}")
    if io["groups_from_dram"]:
        lines.append(
            f"  {io['groups_from_dram']} of the {io['groups_read']} others came from DRAM "
            f"({format_bytes(io['bytes_from_dram'])})"
        )
    if session := report.get("session"):
        lines.append(
            f"  session {session['name']!r}: {report['reused_tokens'][0]} tokens reused, {session['stored_tokens']}"
            f" of {session['tokens']} stored, {format_bytes(session['bytes_written'])} written"
        )
        lines += (f"  note: {note}" for note in session["notes"])
    if quality := report.get("quality"):
        lines.append(
            f"  against {quality['reference']} on {quality['tokens']} tokens: KL {quality['kl']:.4f}, "
            f"top-1 agreement {quality['top1']:.1%}"
        )
    return "\n".join([*lines, *(f"  note: {note}" for note in report["notes"])])


def write_report(report: dict[str, Any], path: Path) -> None:
    """Writes the whole report or leaves the file as it was. A symbolic link keeps pointing where it does."""
    path = path.resolve()
    umask = os.umask(0)
    os.umask(umask)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
        try:
            json.dump(report, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o666 & ~umask)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
