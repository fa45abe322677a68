"""An analysis, for a person."""

from __future__ import annotations

from swapkv_jax.analysis import Analysis, Question, step_seconds
from swapkv_jax.devices import Device
from swapkv_jax.memory_limits import format_bytes
from swapkv_jax.planner.subject import Subject


def analysis_table(
    q: Question, a: Analysis, subject: Subject, device: Device | None, *, from_disk: bool
) -> str:
    """The answers, a line each; `from_disk`: whether layers come from there."""
    shape = f"{q.layers} layers x {q.kv_heads} KV heads x {q.head_dim}"
    where = "no device named" if device is None else device.title
    over = ""
    if subject.context_limit is not None and q.context > subject.context_limit:
        over = f", over the model's limit of {subject.context_limit:,}"
    step = step_seconds(q)
    rows = [
        (f"{subject.name}", f"{shape}, {q.kv_dtype}; {where}"),
        ("request", f"{q.batch} row(s) of {q.context:,} tokens{over}"),
        ("KV", f"{a.kv_bytes_per_token:,} bytes per token, {format_bytes(a.full_kv_bytes)} per request"),
        ("room", _room(q)),
        ("resident", f"{_count(a.tokens_resident, 'tokens')}, {_count(a.requests_resident, 'request(s)')}"),
        (
            "layer",
            f"{_count(a.tokens_layer, 'tokens')}, {_count(a.requests_layer, 'request(s)')} with "
            f"{q.physical_layers} of {q.layers} layers there ({format_bytes(a.layer_slot_bytes)} per request)",
        ),
        ("transfers", _transfers(q, a, step, from_disk=from_disk)),
        (
            "group",
            f"summary {format_bytes(a.summary_bytes)} + reuse {format_bytes(a.reuse_bytes)} + rolling "
            f"{format_bytes(a.rolling_bytes)} = "
            f"{format_bytes(a.summary_bytes + a.reuse_bytes + a.rolling_bytes)} per request (σ {q.sigma}, G "
            f"{q.group_tokens}, {q.reuse_tokens} tokens kept)",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _room(q: Question) -> str:
    if q.device_memory is None or q.weights is None:
        missing = "--weights-bytes" if q.weights is None else "--device or --device-memory"
        return f"unknown: give {missing}"
    room = q.device_memory - q.weights
    return (
        f"{format_bytes(max(0, room))} of {format_bytes(q.device_memory)} beside {format_bytes(q.weights)} of weights"
        + ("" if room > 0 else ", which do not fit")
    )


def _transfers(q: Question, a: Analysis, step: float | None, *, from_disk: bool) -> str:
    if q.transfer is None or step is None or a.predicted_overhead is None:
        return "unknown: give --device, or --link-bandwidth and --tpot"
    limit = "any number of tokens"
    if a.tokens_transfer_limit is not None:
        limit = f"{a.tokens_transfer_limit:,} tokens"
    origin = " from disk (no time per read)" if from_disk else ""
    span = "of their own least time" if q.tpot is None else f"of {step * 1e3:.4g} ms"
    return (
        f"{limit} at {q.transfer / 1e9:.4g} GB/s{origin} in a step {span}; this request adds "
        f"{a.predicted_overhead:.0%} to {step * 1e3:.4g} ms under policy layer"
    )


def _count(number: int | None, what: str) -> str:
    return f"{what} unknown" if number is None else f"{number:,} {what}"
