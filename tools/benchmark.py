"""Time a decode step under each cache policy, and of peers, in interleaved rounds of one process.

    python tools/benchmark.py --policies resident,layer --tier dram,disk --context 7680 --batch 1,4 \\
        --peers transformers --json out.json

Everything that decodes one (context, batch) is alive at once and takes one step per round, in an order that
rotates, so that a noisy machine slows all alike; ratios are medians over rounds of the two times in a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import machine
import numpy as np
from contenders import Contender, OurEngine, PeerDecode, Samples
from peers import PEERS, PeerUnavailable
from tqdm import tqdm

from swapkv_jax import Plan, SwapKVError, UsageError, load_model, make_plan
from swapkv_jax.capture import capture
from swapkv_jax.models import DTYPES, Model
from swapkv_jax.planner import weight_bytes
from swapkv_jax.prefilled import Prefilled, RandomPrefill
from swapkv_jax.store_paths import default_store_dir
from swapkv_jax.talk import Talk

POLICIES, TIERS = ("resident", "layer"), ("dram", "disk")
PAUSE_S = 0.02  # before each step: the last one's threads stop spinning, and reading ahead comes to rest
WARM_UP = 2  # rounds that are not counted


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    args = _parser().parse_args(argv)
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
    model = load_model(args.model, dtype=args.dtype)
    shapes = list(itertools.product(args.context, args.batch))
    plans = {shape: list(_plans(args, model, *shape)) for shape in shapes}
    prompts = {shape: _prompts(args.prompt_file, model, *shape) for shape in shapes}
    peers, skipped = {}, {}
    for name in args.peers:
        try:
            peers[name] = PEERS[name](model)
        except PeerUnavailable as reason:
            skipped[name] = f"skipped ({reason})"
            print(f"{name}: {skipped[name]}", file=sys.stderr)
    uses_disk = any(plan.tier == "disk" for plan in plans[shapes[0]])
    facts = machine.facts(store_dir if uses_disk else None)
    report: dict[str, Any] = {
        "machine": facts,
        "model": args.model,
        "dtype": args.dtype,
        "prefill": args.prefill,
        "prompt": "random tokens" if args.prompt_file is None else args.prompt_file.name,
        "steps": args.steps,
        "skipped": skipped,
        "rows": [],
    }
    for context, batch in shapes:
        shape = context, batch
        with ExitStack() as stack:
            contenders: list[Contender] = []
            for plan in plans[shape]:
                contenders.append(OurEngine(model, plan, store_dir))
                stack.callback(contenders[-1].close)
            for name, peer in peers.items():
                decode = peer.open(batch, context + _new_tokens(args))
                contenders.append(PeerDecode(name, peer.version, decode))
                stack.callback(contenders[-1].close)
            prefilled = _prefilled(args.prefill, model, prompts[shape], store_dir, stack)
            rows = _interleave(contenders, prompts[shape], prefilled, args)
        for row, plan in zip(rows, [*plans[shape], *[None] * len(peers)], strict=True):
            full = (plan or plans[shape][0]).full_kv_bytes
            report["rows"].append(
                {"context": context, "batch": batch, **row, "full_kv_bytes": full, "reuse_rate": None}
            )
        # What the memory can do shows only when nobody else uses it: the best moment counts.
        facts["memory_bytes_per_s"] = max(facts["memory_bytes_per_s"], machine.memory_bandwidth())
    for row in report["rows"]:
        floor = _touched_bytes(model, row["context"], row["batch"]) / facts["memory_bytes_per_s"]
        row["floor_s"] = max(floor, _disk_floor(row))
    return report


def _plans(args: argparse.Namespace, model: Model, context: int, batch: int) -> Iterator[Plan]:
    for policy in args.policies:
        for tier in args.tier if policy == "layer" else ("auto",):
            yield make_plan(
                model.geometry,
                cache=policy,
                tier=tier,
                batch=batch,
                max_context=context + _new_tokens(args),
                dtype=args.dtype,
                physical_layers=args.physical_layers if policy == "layer" else None,
                platform=jax.default_backend(),
            )


def _new_tokens(args: argparse.Namespace) -> int:
    return 1 + WARM_UP + args.steps


def _prompts(file: Path | None, model: Model, context: int, batch: int) -> list[list[int]]:
    """`context` tokens per row: consecutive parts of a text, or random tokens."""
    if file is None:
        return np.random.default_rng(0).integers(0, model.geometry.vocab, (batch, context)).tolist()
    try:
        tokens = model.tokenizer.encode(file.read_text(encoding="utf-8"), chat=False)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}; give --prompt-file a UTF-8 text") from None
    if len(tokens) < batch * context:
        raise UsageError(
            f"{file} has {len(tokens)} tokens, {batch} rows of {context} need {batch * context}; "
            f"give a longer text, or lower --context or --batch"
        )
    return [tokens[row * context : (row + 1) * context] for row in range(batch)]


# ---- measuring -----------------------------------------------------------------------------------------


def _prefilled(
    kind: str, model: Model, prompts: list[list[int]], store_dir: Path, stack: ExitStack
) -> Prefilled | None:
    """What --prefill gives our engines to start from. A captured prefill's files go when `stack` closes."""
    if kind == "random":
        return RandomPrefill(model, prompts)
    if kind == "real":
        return None
    place = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-prefill-", dir=store_dir))
    with Talk(quiet=False).bars() as progress:
        return capture(model, prompts, Path(place), progress=progress)


def _interleave(
    contenders: list[Contender],
    prompts: list[list[int]],
    prefilled: Prefilled | None,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """One row per contender, from rounds in which each takes one step."""
    new, random = _new_tokens(args), isinstance(prefilled, RandomPrefill)
    samples = [Samples() for _ in contenders]
    ttft = []
    title = f"context {len(prompts[0])} batch {len(prompts)}"
    with tqdm(total=len(contenders) * new, desc=title, unit="step", file=sys.stderr) as progress:
        for contender in contenders:
            progress.set_postfix_str(f"prefill {contender.label}")
            ttft.append(contender.prefill(prompts, new, prefilled))
            progress.update()
        before = machine.load()
        for turn in range(WARM_UP + args.steps):
            order = np.roll(np.arange(len(contenders)), turn)
            for index in order:
                progress.set_postfix_str(contenders[index].label)
                time.sleep(PAUSE_S)
                if turn < WARM_UP:
                    contenders[index].step()
                else:
                    contenders[index].measure(samples[index])
                progress.update()
    loads = [before, machine.load()]
    ours = [c for c in contenders if isinstance(c, OurEngine)]
    rows = []
    for contender, sample, seconds in zip(contenders, samples, ttft, strict=True):
        row = {**contender.describe(), **_timings(sample, len(prompts)), "ttft_s": seconds, "load": loads}
        row["ratio_to"] = {
            other.label: _median(np.divide(sample.seconds, theirs.seconds).tolist())
            for other, theirs in zip(contenders, samples, strict=True)
            if other is not contender
        }
        compared = contender in ours or not random  # a peer draws its random KV itself
        row["tokens_as_first"] = _agreeing(ours[0].tokens, contender.tokens) if compared else None
        rows.append(row)
    return rows


def _timings(sample: Samples, batch: int) -> dict[str, Any]:
    tpot = _median(sample.seconds)
    assert tpot is not None
    rates = np.divide(sample.read_bytes, sample.seconds) if sample.read_bytes else np.array([])
    return {
        "tpot_s": tpot,
        "tpot_min_s": min(sample.seconds),
        "tpot_p90_s": float(np.percentile(sample.seconds, 90)),
        "tokens_per_s": batch / tpot,
        "bytes_read_per_step": _median(sample.step_bytes),
        "wait_fraction": sum(sample.wait_s) / sum(sample.seconds) if sample.wait_s else None,
        "disk_bytes_per_s": _median(rates.tolist()),
        "plain_reader_bytes_per_s": _median(sample.plain_rate),
        "ratio_to_plain_reader": _median((rates / sample.plain_rate).tolist()) if len(rates) else None,
    }


def _median(values: list[float] | list[int]) -> float | None:
    return float(np.median(values)) if values else None


def _agreeing(first: list[list[int]], tokens: list[list[int]]) -> int:
    """Steps before the first in which any row chose another token."""
    return next(
        (i for i, pair in enumerate(zip(first, tokens, strict=True)) if pair[0] != pair[1]), len(first)
    )


def _touched_bytes(model: Model, context: int, batch: int) -> int:
    """Bytes of all weights and of the KV of `context` tokens: a step reads each once."""
    itemsize = np.dtype(DTYPES[model.dtype]).itemsize
    kv = batch * context * model.geometry.kv_bytes_per_token(itemsize)
    return weight_bytes(model.geometry, model.dtype) + kv


def _disk_floor(row: dict[str, Any]) -> float:
    """Seconds in which the plain reader would deliver what a step reads."""
    if row["bytes_read_per_step"] is None:
        return 0.0
    return row["bytes_read_per_step"] / row["plain_reader_bytes_per_s"]


# ---- the table -----------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> str:
    """The report for reading."""
    facts = report["machine"]
    disk = facts["disk_bytes_per_s"]
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores; memory {facts['memory_bytes_per_s'] / 1e9:.1f} GB/s"
        + (f", disk {disk / 1e9:.2f} GB/s" if disk else "")
        + f"; jax {facts['jax']}; prompt of {report['prompt']}, {report['prefill']} prefill; {report['steps']} steps",
        f"{'':12} {'context':>7} {'batch':>5} {'ms/step':>8} {'p90':>8} {'floor':>7} {'tok/s':>7} "
        f"{'x first':>8} {'wait':>5} {'read MB':>8} {'x plain':>7} {'device MB':>9} {'load':>5}",
    ]
    first: dict[tuple[int, int], str] = {}
    for row in report["rows"]:
        label = row["peer"] or " ".join(filter(None, (row["policy"], row["tier"])))
        reference = first.setdefault((row["context"], row["batch"]), label)
        lines.append(
            f"{label:12} {row['context']:7} {row['batch']:5} {row['tpot_s'] * 1e3:8.1f} "
            f"{row['tpot_p90_s'] * 1e3:8.1f} {row['floor_s'] * 1e3:7.1f} {row['tokens_per_s']:7.1f} "
            f"{_cell(row['ratio_to'].get(reference), '8.3f')} {_cell(row['wait_fraction'], '5.2f')} "
            f"{_cell(row['bytes_read_per_step'], '8.1f', 1e6)} {_cell(row['ratio_to_plain_reader'], '7.2f')} "
            f"{row['kv_bytes']['device'] / 1e6:9.1f} {row['load'][1]:5.1f}"
        )
    lines += [f"{name}: {reason}" for name, reason in report["skipped"].items()]
    return "\n".join(lines)


def _cell(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-".rjust(int(form.split(".")[0])) if value is None else f"{value / unit:{form}}"


# ---- flags ---------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmark.py", description="Time a decode step under each cache policy, and of peers."
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policies", type=_names("policy", POLICIES), default=list(POLICIES))
    parser.add_argument("--context", type=_counts, default=[7680], help="tokens of each prompt, N[,N]")
    parser.add_argument("--batch", type=_counts, default=[1], help="rows, B[,B]")
    parser.add_argument("--steps", type=_count, default=32, help="timed steps")
    parser.add_argument("--tier", type=_names("tier", TIERS), default=["dram"], help="where layer keeps KV")
    parser.add_argument("--physical-layers", type=_count, default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--peers", type=_names("peer", tuple(PEERS)), default=[])
    parser.add_argument("--prompt-file", type=Path, help="real text; random tokens without it")
    parser.add_argument(
        "--prefill",
        choices=("real", "once", "random"),
        default="real",
        help="once: all our engines start from one computation, kept in --store-dir meanwhile; random: keys and "
        "values are made up. Both time decode alone and give no ttft",
    )
    parser.add_argument("--store-dir", type=Path, help="directory of the disk tier")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    return parser


def _names(what: str, known: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
        return list(dict.fromkeys(names))

    return parse


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
