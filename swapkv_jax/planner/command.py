"""Command line of the analysis: what a model needs on a device, neither of which has to be here.

Exit codes: 0 done, 2 usage, 1 failure (a model that cannot be read; no plan that fits, but for --json).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec

from swapkv_jax.analysis import Analysis, Question, analyse
from swapkv_jax.devices import Device, find_device
from swapkv_jax.errors import SwapKVError
from swapkv_jax.plan import DType
from swapkv_jax.planner.budgets import Budgets, weight_bytes, weights_read
from swapkv_jax.planner.candidates import Request
from swapkv_jax.planner.choose import Candidate, Choice, NothingFits, choose_plan
from swapkv_jax.planner.costs import Rates
from swapkv_jax.planner.explain import explain
from swapkv_jax.planner.flags import CONTEXT, make_parser
from swapkv_jax.planner.subject import Subject, find_subject
from swapkv_jax.planner.table import analysis_table

_OWN_SIZES = (
    "the plans below are of the planner's own sizes, padded to whole groups; "
    "--physical-layers, --sigma, --reuse-tokens and --tpot change only the lines above"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        subject = find_subject(options.model)
        device = None if options.device is None else find_device(options.device)
        question = _question(options, subject, device)
        answers = analyse(question)
        if subject.note is not None:
            print(f"note: {subject.note}", file=sys.stderr)
        if options.json:
            print(json.dumps(_record(options, question, answers, subject, device), indent=2))
            return 0
        from_disk = device is not None and device.shared and options.link_bandwidth is None
        print(analysis_table(question, answers, subject, device, from_disk=from_disk))
        if device is not None:
            choice = _choice(options, question, subject, device)
            print(f"why: {choice}" if isinstance(choice, str) else f"{_OWN_SIZES}\n{explain(choice)}")
    except NothingFits as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1  # nothing is wrong with how the command was called
    except SwapKVError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _question(options: argparse.Namespace, subject: Subject, device: Device | None) -> Question:
    dtype = options.kv_dtype or _default_dtype(device)
    weights = read = options.weights_bytes
    if weights is None and subject.geometry is not None:
        kept = _weights_dtype(dtype, device)
        weights, read = weight_bytes(subject.geometry, kept), weights_read(subject.geometry, kept)
    device_memory, memory, transfer, group_tokens = None, None, None, 4
    if device is not None:
        device_memory, memory = device.device_memory.value, float(device.memory_bandwidth.value)
        transfer = float(device.disk.bandwidth if device.link is None else device.link.value)
        group_tokens = device.disk.group_tokens
    context = min(CONTEXT, subject.context_limit or CONTEXT) if options.context is None else options.context

    def given(name: str, usual: int, most: int) -> int:
        value = getattr(options, name)
        return max(1, min(usual, most)) if value is None else value

    return Question(
        layers=subject.layers,
        kv_heads=subject.kv_heads,
        head_dim=subject.head_dim,
        context=context,
        batch=options.batch,
        kv_dtype=dtype,
        physical_layers=given("physical_layers", 2, subject.layers),
        device_memory=device_memory if options.device_memory is None else options.device_memory,
        weights=weights,
        weights_read=read,
        transfer=transfer if options.link_bandwidth is None else options.link_bandwidth,
        memory=memory,
        tpot=options.tpot,
        sigma=given("sigma", 8, subject.kv_heads * subject.head_dim),
        group_tokens=given("group_tokens", group_tokens, context),
        reuse_tokens=given("reuse_tokens", 400, context),
    )


def _default_dtype(device: Device | None) -> str:
    return "float32" if device is not None and device.platform == "cpu" else "bfloat16"


def _weights_dtype(kv_dtype: str, device: Device | None) -> str:
    """Weights and KV are of one type, but no weights are kept in fp8."""
    return kv_dtype if kv_dtype in get_args(DType) else _default_dtype(device)


def _choice(options: argparse.Namespace, q: Question, subject: Subject, device: Device) -> Choice | str:
    """What would be chosen, or why this engine has no plan to choose from. NothingFits: it has, but none fits."""
    if subject.geometry is None:
        return "no plan, since the engine does not decode this model"
    if q.kv_dtype not in get_args(DType):
        return f"no plan, since the engine keeps KV in {', '.join(get_args(DType))}"
    if options.weights_bytes is not None:
        return "no plan, since the engine's own weights are not of the size given"
    if q.context > subject.geometry.context_limit:
        return f"no plan, since the context is over the model's limit of {subject.geometry.context_limit:,}"
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
    return choose_plan(request, rates, options.max_overhead)


def _record(
    options: argparse.Namespace, q: Question, answers: Analysis, subject: Subject, device: Device | None
) -> dict[str, Any]:
    """The analysis, and beside it `plan` (None: there is none), `why`, and the `candidates` for it."""
    plan, candidates, why = None, (), "no device named"
    if device is not None:
        try:
            choice = _choice(options, q, subject, device)
        except NothingFits as error:
            why, candidates = str(error), error.candidates
        else:
            why = choice if isinstance(choice, str) else choice.reason
            if isinstance(choice, Choice):
                plan, candidates = msgspec.to_builtins(choice.plan), choice.candidates
    considered = [_candidate(candidate) for candidate in candidates]
    return {**dataclasses.asdict(answers), "plan": plan, "why": why, "candidates": considered}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    needs, cost = candidate.needs, candidate.cost
    return {
        "policy": candidate.plan.policy,
        "tier": candidate.plan.tier,
        "device_bytes": needs.device + needs.aliased,
        "dram_bytes": needs.dram,
        "disk_bytes": needs.disk,
        "step_s": None if cost is None else cost.step_s,
        "overhead": candidate.overhead,
        "short": list(candidate.short),
    }
