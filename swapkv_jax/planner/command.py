"""Command line of the analysis: what a model needs on a device, neither of which has to be here.

Exit codes: 0 done, 2 usage, 1 failure (a model that cannot be read).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import cast, get_args

from swapkv_jax.analysis import KV_BYTES, Analysis, Question, analyse, step_seconds
from swapkv_jax.devices import Device, device_names, find_device
from swapkv_jax.errors import PlanError, SwapKVError, UsageError
from swapkv_jax.memory_limits import format_bytes
from swapkv_jax.models.named import model_names
from swapkv_jax.plan import DType
from swapkv_jax.planner.budgets import Budgets, weight_bytes
from swapkv_jax.planner.candidates import Request
from swapkv_jax.planner.choose import MAX_OVERHEAD, choose_plan
from swapkv_jax.planner.costs import Rates
from swapkv_jax.planner.explain import explain
from swapkv_jax.planner.sizes import parse_rate, parse_seconds, parse_size
from swapkv_jax.planner.subject import Subject, find_subject

_CONTEXT = 32_768
_DTYPES = {"fp32": "float32", "f32": "float32", "bf16": "bfloat16", "fp16": "float16", "f16": "float16"}


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="python -m swapkv_jax.planner",
        description="What a model's KV cache needs on a device, how far its memory and its link reach, and which "
        "policy would be chosen. Neither has to be here: no weights are read.",
        epilog="Sizes: 85GB = 85·10^9 bytes, 1GiB = 2^30; rates likewise: 56GB/s or 56GBps; times: 200ms or 0.2s. "
        "Exit codes: 0 done, 2 usage, 1 failure.",
    )
    add = parser.add_argument
    add(
        "--model",
        required=True,
        help="a Hugging Face config.json or its directory, a GGUF file, or one of "
        + ", ".join(model_names()),
    )
    add("--device", help=f"a JSON file, or one of {', '.join(device_names())} (default: flags alone)")
    add("--device-memory", type=_size, metavar="SIZE", help="in place of the device's, weights included")
    add("--weights-bytes", type=_size_or_none, metavar="SIZE", help="in place of what the shapes say")
    add(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens per row (default: the model's limit, at most {_CONTEXT})",
    )
    add("--batch", type=int, default=1, metavar="N", help="rows of one request (default 1)")
    add(
        "--kv-dtype",
        type=_dtype,
        metavar="DTYPE",
        help=f"of the KV cache: {', '.join(KV_BYTES)} (default: float32 on a CPU, else bfloat16)",
    )
    add(
        "--physical-layers",
        type=int,
        default=2,
        metavar="P",
        help="layers on the device under policy layer (2)",
    )
    add("--link-bandwidth", type=_rate, metavar="RATE", help="in place of the device's, from host to device")
    add(
        "--tpot",
        type=_seconds,
        metavar="TIME",
        help="of one step (default: what reading weights and KV takes)",
    )
    add("--sigma", type=int, default=8, metavar="N", help="Hkv·D/r of policy group's summary (8; tight: 32)")
    add("--group-tokens", type=int, metavar="G", help="tokens per group (default: the device's, or 4)")
    add("--reuse-tokens", type=int, default=400, metavar="N", help="tokens of kept groups per row (400)")
    add(
        "--max-overhead",
        type=float,
        default=MAX_OVERHEAD,
        metavar="X",
        help="that policy layer may cost (0.3)",
    )
    add("--exact", action="store_true", help="never choose policy group, which is approximate")
    add("--json", action="store_true", help="print the analysis as one JSON object; null is unknown")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        subject = find_subject(options.model)
        device = None if options.device is None else find_device(options.device)
        question = _question(options, subject, device)
        analysis = analyse(question)
        if subject.note is not None:
            print(f"note: {subject.note}", file=sys.stderr)
        if options.json:
            print(json.dumps(dataclasses.asdict(analysis), indent=2))
            return 0
        print(_table(question, analysis, subject, device))
        if device is not None:
            print(_choice(options, question, subject, device))
    except SwapKVError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _question(options: argparse.Namespace, subject: Subject, device: Device | None) -> Question:
    dtype = options.kv_dtype or _default_dtype(device)
    weights = options.weights_bytes
    if weights is None and subject.geometry is not None:
        weights = weight_bytes(subject.geometry, _weights_dtype(dtype, device))
    device_memory, memory, transfer, group_tokens = None, None, None, 4
    if device is not None:
        device_memory, memory = device.device_memory.value, float(device.memory_bandwidth.value)
        transfer = float(device.disk.bandwidth if device.link is None else device.link.value)
        group_tokens = device.disk.group_tokens
    limit = subject.context_limit
    context = options.context
    return Question(
        layers=subject.layers,
        kv_heads=subject.kv_heads,
        head_dim=subject.head_dim,
        context=min(_CONTEXT, limit or _CONTEXT) if context is None else context,
        batch=options.batch,
        kv_dtype=dtype,
        physical_layers=options.physical_layers,
        device_memory=device_memory if options.device_memory is None else options.device_memory,
        weights=weights,
        transfer=transfer if options.link_bandwidth is None else options.link_bandwidth,
        memory=memory,
        tpot=options.tpot,
        sigma=options.sigma,
        group_tokens=group_tokens if options.group_tokens is None else options.group_tokens,
        reuse_tokens=options.reuse_tokens,
    )


def _default_dtype(device: Device | None) -> str:
    return "float32" if device is not None and device.platform == "cpu" else "bfloat16"


def _weights_dtype(kv_dtype: str, device: Device | None) -> str:
    """Weights and KV are of one type, but no weights are kept in fp8."""
    return kv_dtype if kv_dtype in get_args(DType) else _default_dtype(device)


def _table(q: Question, a: Analysis, subject: Subject, device: Device | None) -> str:
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
        ("transfers", _transfers(q, a, step, shared=device is not None and device.shared)),
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


def _transfers(q: Question, a: Analysis, step: float | None, *, shared: bool) -> str:
    if q.transfer is None or step is None or a.predicted_overhead is None:
        return "unknown: give --device, or --link-bandwidth and --tpot"
    limit = "any number of tokens"
    if a.tokens_transfer_limit is not None:
        limit = f"{a.tokens_transfer_limit:,} tokens"
    origin = " from disk" if shared else ""
    span = "of their own least time" if q.tpot is None else f"of {step * 1e3:.4g} ms"
    return (
        f"{limit} at {q.transfer / 1e9:.4g} GB/s{origin} in a step {span}; this request adds "
        f"{a.predicted_overhead:.0%} to {step * 1e3:.4g} ms under policy layer"
    )


def _count(number: int | None, what: str) -> str:
    return f"{what} unknown" if number is None else f"{number:,} {what}"


def _choice(options: argparse.Namespace, q: Question, subject: Subject, device: Device) -> str:
    """Which plan would be chosen, as far as this engine has one."""
    if subject.geometry is None:
        return "why: no plan, since the engine does not decode this model"
    if q.kv_dtype not in get_args(DType):
        return f"why: no plan, since the engine keeps KV in {', '.join(get_args(DType))}"
    if options.weights_bytes is not None:
        return "why: no plan, since the engine's own weights are not of the size given"
    memory = q.device_memory
    budgets = Budgets(disk=device.disk.space, host=memory)
    if device.dram is not None:
        budgets = Budgets(device=memory, dram=device.dram.value, disk=device.disk.space)
    rates = Rates.of(device)
    if options.link_bandwidth is not None:
        rates = dataclasses.replace(
            rates, link=options.link_bandwidth, source=f"{rates.source} and --link-bandwidth"
        )
    request = Request(
        geometry=subject.geometry,
        batch=q.batch,
        max_context=q.context,
        dtype=cast(DType, q.kv_dtype),
        group_size=q.group_tokens,
        platform=device.platform,
        capability=device.capability,
        budgets=budgets,
        exact=options.exact,
    )
    try:
        return explain(choose_plan(request, rates, options.max_overhead))
    except PlanError as error:
        return f"why: {error}"


def _flag(parse, text: str):
    try:
        return parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    return _flag(parse_size, text)


def _size_or_none(text: str) -> int:
    return 0 if text.strip() in ("0", "0B", "0b") else _size(text)


def _rate(text: str) -> int:
    return _flag(parse_rate, text)


def _seconds(text: str) -> float:
    return _flag(parse_seconds, text)


def _dtype(text: str) -> str:
    name = text.lower()
    return _DTYPES.get(name, "fp8" if name.startswith(("fp8", "float8")) else name)
