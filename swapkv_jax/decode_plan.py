"""The plan of a decode command: from its flags, the machine it is on, and the plans that ship with the package."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from swapkv_jax.devices import Device, device_of_kind
from swapkv_jax.errors import PlanError, UsageError
from swapkv_jax.memory_limits import available_memory
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.plan import DType, Plan
from swapkv_jax.plan_files import load_plan, plans_for
from swapkv_jax.planner import UNKNOWN, Budgets, Rates, Request, choose_plan, explain, parse_size, shortfalls
from swapkv_jax.store_paths import default_store_dir

# What a process takes between the planning and its peak that no plan counts: compiled code, threads, allocators
# (130 to 160 MiB measured, whatever the policy).
_RUNTIME = 192 << 20
# Of an accelerator's free memory: the compiler's temporaries come out of it too.
_USABLE = 0.9
# A shipped plan's choices are taken for contexts down to this part of its own.
_SHORTEST = 1 / 4


def decode_plan(
    options: argparse.Namespace, geometry: Geometry, lengths: Sequence[int], dtype: DType
) -> tuple[Plan, str]:
    """The plan for prompts of `lengths` tokens, and why it is this one (empty where the flags left no choice).

    Raises:
      UsageError: a prompt that is too long. PlanError: no plan fits, or the one that was named does not.
    """
    from swapkv_jax.resources import device_memory
    from swapkv_jax.staging import compute_capability

    needed = max(lengths) + options.max_new_tokens
    limit = min(options.max_context or geometry.context_limit, geometry.context_limit)
    if needed > limit:
        _refuse_length(options, lengths, limit)
    here = device_memory()[0]
    device = device_of_kind(here.name)
    # JAX does not say of a GPU that its memory is the host's; a description does.
    budgets = _budgets(options, here.free, shared=here.shared or (device is not None and device.shared))
    if options.plan is not None:
        return _named_plan(options, geometry, len(lengths), needed, budgets), ""
    request = Request(
        geometry=geometry,
        cache=options.cache or "auto",
        tier=options.tier or "auto",
        batch=len(lengths),
        max_context=options.max_context or needed,
        dtype=dtype,
        kv_dtype=options.kv_dtype,
        physical_layers=options.physical_layers,
        platform=here.platform,
        capability=compute_capability(),
        budgets=budgets,
        exact=options.exact,
    )
    choice = choose_plan(request, _rates(device, options.store_dir), options.max_overhead)
    if len(choice.candidates) == 1:
        return choice.plan, ""
    why = explain(choice)
    if device is not None and (shipped := _shipped(request, choice.plan, device)) is not None:
        plan, note = shipped
        return plan, f"{why}\n  {note}"
    return choice.plan, why


def _refuse_length(options: argparse.Namespace, lengths: Sequence[int], limit: int) -> None:
    longest = max(lengths)
    raise UsageError(
        f"prompt {list(lengths).index(longest) + 1} has {longest} tokens and with {options.max_new_tokens} new ones "
        f"is over the limit of {limit}; shorten it"
        + (f" or lower --max-new-tokens to {limit - longest}" if limit > longest else "")
    )


def _budgets(options: argparse.Namespace, free: int | None, *, shared: bool) -> Budgets:
    """What the flags allow, and the machine where they do not say."""
    given = {name: getattr(options, name) for name in ("device_memory", "dram_memory", "disk_space")}
    sizes = {name.split("_")[0]: parse_size(size) for name, size in given.items() if size is not None}
    host = max(0, available_memory() - _RUNTIME)
    if shared:
        return Budgets(**sizes, host=host)
    device = None if free is None else int(_USABLE * free)
    return Budgets(**{"device": device, "dram": host, **sizes})


def _named_plan(
    options: argparse.Namespace, geometry: Geometry, rows: int, needed: int, budgets: Budgets
) -> Plan:
    plan = load_plan(options.plan)
    plan.validate(geometry)
    if options.exact and plan.policy == "group":
        raise PlanError(
            "the plan's policy is group, which is approximate: --exact rules it out; leave one of them out"
        )
    if plan.batch != rows:
        raise PlanError(f"the plan is for {plan.batch} row(s), there are {rows} prompts; match them")
    if needed > plan.max_context:
        raise PlanError(
            f"the plan's max_context of {plan.max_context} is less than the {needed} tokens needed; "
            f"shorten the prompt or use a plan for {needed}"
        )
    if short := shortfalls(plan, geometry, budgets):
        raise PlanError(f"the plan {', '.join(short)}; raise the budget or use a smaller plan")
    return plan


def _rates(device: Device | None, store_dir: Path | None) -> Rates:
    """What was measured on this machine, else what describes its device, else nothing."""
    from swapkv_jax.disk_curve import saved_disk_curve
    from swapkv_jax.rates import saved_device_rates

    described = UNKNOWN if device is None else Rates.of(device)
    measured, _ = saved_device_rates()
    directory = (store_dir or default_store_dir()).absolute()
    curve, _ = saved_disk_curve(next(place for place in (directory, *directory.parents) if place.is_dir()))
    known = [
        *(["memory and link as measured here"] if measured is not None else []),
        *(["disk as measured here"] if curve is not None else []),
    ]
    if len(known) < 2:
        known.append(f"{described.source} (python -m swapkv_jax.resources --measure would tell)")
    return Rates(
        link=described.link if measured is None else measured.to_device,
        memory=described.memory if measured is None else measured.memory,
        disk=described.disk if curve is None else curve,
        source=", ".join(known),
    )


def _shipped(request: Request, chosen: Plan, device: Device) -> tuple[Plan, str] | None:
    """A shipped plan of the chosen policy for this model, device, rows and dtype, fitted to the request's context."""
    context = chosen.max_context
    for name, file in plans_for(request.geometry, device.name).items():
        same = all(getattr(file.plan, key) == getattr(chosen, key) for key in ("policy", "batch", "dtype"))
        if not same or not _SHORTEST * file.plan.max_context <= context <= file.plan.max_context:
            continue
        plan = msgspec.structs.replace(file.plan, max_context=context)
        plan.validate(request.geometry)
        if not shortfalls(plan, request.geometry, request.budgets):
            fitted = "" if plan == file.plan else f", fitted to {context} tokens"
            return plan, f"shipped plan {name} ({file.status}{fitted}); --plan {name} takes it as it is"
    return None
