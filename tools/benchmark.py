"""Time a decode step under each cache policy, and of peers, in interleaved rounds of one process.

    python tools/benchmark.py --policies resident,layer --tier dram,disk --context 7680 --batch 1,4 \\
        --peers transformers --json out.json
    python tools/benchmark.py --policies resident,group --prompt-file novel.txt,essay.txt --batch 1,8 --json out.json
    python tools/benchmark.py --policies group --geometry smollm2-135m --weights random --prefill random \\
        --context 8192,32768 --json out.json

Everything that decodes one (context, batch) is alive at once and takes a turn of some steps per round, in an order
that rotates, so that a noisy machine slows all alike; ratios are medians over rounds of the two times in a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import machine
import numpy as np
from adapters import Adapters, adapter_of, adapters_for
from benchmark_flags import make_parser
from benchmark_table import table
from contenders import RANDOM_DEPTH, Contender, OurEngine, PeerDecode, Workload
from floors import floors, growth
from peers import PEERS, PeerUnavailable
from policies import SELECTIVE, parse_settings, policy_plan
from random_adapters import random_adapters
from random_model import random_model
from rounds import interleave, new_tokens
from selection_flags import given_choices
from windows import cut_windows, read_texts

from swapkv_jax import Plan, SwapKVError, UsageError, load_model
from swapkv_jax.capture import capture
from swapkv_jax.models import Model
from swapkv_jax.prefilled import Prefilled, RandomPrefill
from swapkv_jax.rates import memory_bandwidth
from swapkv_jax.staging import compute_capability
from swapkv_jax.store_paths import default_store_dir
from swapkv_jax.talk import Talk
from swapkv_jax.tiers.throttled import StorageProfile, storage_profile

Tokens = list[list[int]]
SAY = Talk(quiet=False)
RANDOM_NOTE = (
    "random keys have no structure: a step selects other groups than the last, so reuse is lower and reads are more "
    "than with real text"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    args = make_parser().parse_args(argv)
    try:
        report = run(args)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    except SwapKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(table(report))
    return 0


@dataclass(frozen=True)
class Setup:
    """What all shapes have in common."""

    model: Model
    adapters: Adapters
    peers: dict[str, Any]
    prefill: str
    store_dir: Path
    capture_dir: Path | None
    profile: StorageProfile | None


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report of every (context, batch) in `args`.

    Raises:
        SwapKVError: flags that cannot work, a model or tier that fails.
    """
    if not os.access(args.json.parent, os.W_OK) or args.json.is_dir():
        raise UsageError(f"cannot write {args.json}; give --json a file in a directory that is writable")
    store_dir = args.store_dir or default_store_dir()
    try:
        store_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {store_dir}: {error.strerror}; choose another --store-dir") from None
    texts = read_texts(args.prompt_file, "--prompt-file") if args.prompt_file else None
    new = new_tokens(args.steps, args.burst)
    if args.weights == "random":
        model = random_model(args.model, args.dtype, max(args.context) + new)
    else:
        model = load_model(args.model, dtype=args.dtype)
    shapes = list(itertools.product(args.context, args.batch))
    plans = {shape: list(_plans(args, model, *shape)) for shape in shapes}
    prefill = _prefill_kind(args, engines=len(plans[shapes[0]]))
    prompts = {shape: _prompts(texts, model, *shape, new) for shape in shapes}
    peers, skipped = {}, {}
    for name in args.peers:
        try:
            peers[name] = PEERS[name](model)
        except PeerUnavailable as reason:
            skipped[name] = f"skipped ({reason})"
            print(f"{name}: {skipped[name]}", file=sys.stderr)
    if args.weights == "random":
        adapters = random_adapters(model)
    else:
        used = (plan for _, plan in itertools.chain(*plans.values()))
        adapters = adapters_for(model, used, args.adapter, SAY)
    profile = None if args.storage_profile is None else storage_profile(args.storage_profile)
    setup = Setup(model, adapters, peers, prefill, store_dir, args.capture_dir, profile)
    uses_disk = any(plan.tier == "disk" for _, plan in plans[shapes[0]])
    facts = machine.facts(store_dir if uses_disk else None)
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        rows += _measure(setup, args, plans[shape], *prompts[shape])
        # What the memory can do shows only when nobody else uses it: the best moment counts.
        facts["memory_bytes_per_s"] = max(facts["memory_bytes_per_s"], memory_bandwidth())
    for row in rows:
        row |= floors(row, model, facts["memory_bytes_per_s"])
    return {
        "machine": facts,
        "model": model.name if args.weights == "random" else args.model,
        "dtype": args.dtype,
        "storage_profile": args.storage_profile,
        "prefill": prefill,
        "prompt": "random tokens" if texts is None else ", ".join(texts),
        "forced": texts is not None,
        "steps": args.steps,
        "burst": args.burst,
        "random_reader": f"reads of single records at random places of the engine's own files, past the page cache, "
        f"{RANDOM_DEPTH} threads with one read each in flight",
        "skipped": skipped,
        "notes": [RANDOM_NOTE] if prefill == "random" and set(SELECTIVE) & set(args.policies) else [],
        "kv_memory": args.kv_memory,
        "rows": rows,
        "growth": growth(rows, facts["memory_bytes_per_s"]),
    }


def _measure(
    setup: Setup,
    args: argparse.Namespace,
    plans: list[tuple[str, Plan]],
    prompts: Tokens,
    following: Tokens | None,
) -> list[dict[str, Any]]:
    """The rows of one (context, batch)."""
    context, batch = len(prompts[0]), len(prompts)
    with ExitStack() as stack:
        contenders: list[Contender] = []
        for policy, plan in plans:
            adapter = adapter_of(setup.adapters, plan)
            ours = OurEngine(setup.model, plan, setup.store_dir, adapter, setup.profile, policy)
            contenders.append(ours)
            stack.callback(contenders[-1].close)
        for name, peer in setup.peers.items():
            decode = peer.open(batch, plans[0][1].max_context)
            contenders.append(PeerDecode(name, peer.version, decode))
            stack.callback(contenders[-1].close)
        work = Workload(
            prompts=prompts,
            new_tokens=new_tokens(args.steps, args.burst),
            following=following,
            prefilled=_prefilled(setup, prompts, stack),
        )
        rows = interleave(contenders, work, steps=args.steps, burst=args.burst)
    shape = {"context": context, "batch": batch, "full_kv_bytes": plans[0][1].full_kv_bytes}
    return [shape | row for row in rows]


def _plans(args: argparse.Namespace, model: Model, context: int, batch: int) -> Iterator[tuple[str, Plan]]:
    """The plans to measure, with their policies' names."""
    tiers = {"resident": ("auto",), "layer": args.tier, "flexgen": ("disk",)}
    given = parse_settings(args.set)
    given["group"] = given_choices(args) | given.get("group", {})
    for policy in args.policies:
        for tier in tiers.get(policy, args.group_tier):
            layers = {"physical_layers": args.physical_layers} if policy in ("layer", "flexgen") else {}
            yield (
                policy,
                policy_plan(
                    model.geometry,
                    policy,
                    given.get(policy, {}),
                    tier=tier,
                    memory=args.kv_memory,
                    batch=batch,
                    max_context=context + new_tokens(args.steps, args.burst),
                    dtype=args.dtype,
                    platform=jax.default_backend(),
                    capability=compute_capability(),
                    **layers,
                ),
            )


def _prompts(
    texts: dict[str, str] | None, model: Model, context: int, batch: int, new: int
) -> tuple[Tokens, Tokens | None]:
    """`context` tokens per row, and the `new` ones that follow them in the texts; random tokens without texts."""
    if texts is None:
        return np.random.default_rng(0).integers(0, model.geometry.vocab, (batch, context)).tolist(), None
    lower = "--context, --batch or --steps"
    windows = cut_windows(model, texts, batch, context, new - 1, lower=lower)
    return [window.prompt for window in windows], [window.following for window in windows]


def _prefill_kind(args: argparse.Namespace, engines: int) -> str:
    if args.capture_dir is not None and args.prefill in ("real", "random"):
        raise UsageError("--capture-dir keeps what --prefill once computes; leave one of them out")
    once = args.capture_dir is not None or (args.prompt_file is not None and engines > 1)
    return args.prefill or ("once" if once else "real")


def _prefilled(setup: Setup, prompts: Tokens, stack: ExitStack) -> Prefilled | None:
    """What our engines start from. A captured prefill that is not to be kept goes when `stack` closes."""
    if setup.prefill == "random":
        return RandomPrefill(setup.model, prompts)
    if setup.prefill == "real":
        return None
    place = setup.capture_dir
    if place is None:
        scratch = tempfile.TemporaryDirectory(prefix="benchmark-prefill-", dir=setup.store_dir)
        place = Path(stack.enter_context(scratch))
    with SAY.bars() as progress:
        return capture(setup.model, prompts, place, progress=progress)


if __name__ == "__main__":
    sys.exit(main())
