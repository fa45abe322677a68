"""Tune a plan of policy `group` for a model, a memory budget and a disk, and write it with what it promises.

    python tools/tune.py --batch 4 --max-context 8192 --memory 160MiB --loss 0.05
    python tools/tune.py --batch 4 --memory 160MiB --loss 0.05 --storage-profile emmc-250MBps --check

What was measured is kept in --tables, so that a run that was interrupted goes on where it was, and another goal takes
what it can. Exit codes: 0 done, 2 usage, 1 failure.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from flag_types import add_tables_flags, count, counts, nats, paths
from outputs import check_json, make_directory
from tune_check import check
from windows import cut_windows, read_texts

from swapkv_jax import SwapKVError, UsageError, load_model
from swapkv_jax.calibration import default_text, ensure_adapters
from swapkv_jax.devices import device_of_kind
from swapkv_jax.disk_curve import ensure_disk_curve, profile_curve
from swapkv_jax.interrupts import interruptible
from swapkv_jax.models import Model
from swapkv_jax.plan import Plan
from swapkv_jax.plan_files import Numbers, PlanFile
from swapkv_jax.planner import parse_size
from swapkv_jax.store_paths import default_store_dir
from swapkv_jax.talk import Talk
from swapkv_jax.tiers.throttled import PROFILES, storage_profile
from swapkv_jax.tuner.choice import Choice, Space
from swapkv_jax.tuner.tables import Tables
from swapkv_jax.tuner.tune import Goal, Text, Tuner, tune

PLANS = Path(__file__).parents[1] / "plans"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    say = Talk(args.quiet)
    with warnings.catch_warnings(), interruptible():
        warnings.showwarning = lambda message, *_args, **_kwargs: say.always(f"warning: {message}")
        try:
            run(args, say)
        except SwapKVError as error:
            say.always(f"{parser.prog}: error: {error}")
            return error.exit_code
        except KeyboardInterrupt:
            say.always(f"{parser.prog}: interrupted; the same command goes on where it was")
            return 1
    return 0


def run(args: argparse.Namespace, say: Talk) -> PlanFile:
    """Tunes, writes the plan, and checks it if asked to.

    Raises:
        SwapKVError: flags that cannot work, nothing within the bounds, a model or tier that fails.
    """
    started = time.perf_counter()
    if args.out is not None:
        check_json(args.out, "--out")
    store_dir, tables = args.store_dir or default_store_dir(), Tables(args.tables, fresh=args.fresh)
    make_directory(store_dir, "--store-dir")
    with say.bars() as progress:
        model = load_model(args.model, args.dtype, progress)
    max_context = args.max_context or model.geometry.context_limit
    context = min(args.context, max_context - args.tokens)
    if context < args.context:
        say(
            f"calibration prompts have {context} tokens, so that --tokens {args.tokens} more fit {max_context}"
        )
    texts = read_texts(args.texts, "--texts") if args.texts else {"default": default_text()}
    windows = cut_windows(model, texts, args.rows, context, args.tokens)
    text = Text(
        prompts=[window.prompt for window in windows],
        following=[window.following[: args.tokens] for window in windows],
        directory=args.tables / "prefills",
    )
    with say.bars() as progress:
        adapters, note = ensure_adapters(model, args.groups, progress=progress)
    say(note)
    profile = None if args.storage_profile is None else storage_profile(args.storage_profile)
    with say.bars() as progress:
        here, note = ensure_disk_curve(store_dir, progress)
    say(note)
    disk = here if profile is None else profile_curve(profile)
    goal = Goal(
        batch=args.batch,
        max_context=max_context,
        memory=args.memory,
        loss=args.loss,
        dram=args.dram_memory,
    )
    with say.bars() as progress:
        tuner = Tuner(
            model,
            goal,
            text=text,
            adapters=adapters,
            disk=disk,
            store_dir=store_dir,
            tables=tables,
            progress=progress,
        )
        found = tune(tuner, Space(group_tokens=tuple(sorted(args.groups))), _told(say))
    plan = tuner.plan(found.choice)
    result = PlanFile(
        status="predicted",
        model=model.name,
        device=_device(),
        predicted=promised(
            tuner, found.choice, args.storage_profile or f"as measured, up to {here.best / 1e9:.1f} GB/s"
        ),
        note=f"tuned on {len(found.measured)} choices",
        plan=plan,
    )
    out = args.out or PLANS / f"{_file_name(model, result.device, plan, args.storage_profile)}.json"
    try:
        out.write_text(result.to_json())
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}; choose another --out") from None
    print(_table(result, found.choice))
    say(f"written to {out} after {time.perf_counter() - started:.0f} s")
    if args.check:
        with say.bars() as progress:
            print(check(tuner, found, here, profile))
    return result


def promised(tuner: Tuner, choice: Choice, disk: str) -> Numbers:
    """What is said of a choice beside its plan: sizes in bytes, times in seconds per step."""
    step, replayed = tuner.step(choice), tuner.replayed(choice)
    numbers = {
        "step_s": step.total,
        "compute_s": step.compute,
        "host_s": step.host,
        "read_s": step.read,
        "exposed_read_s": step.exposed,
        "loss": replayed.kl,
        "top1": replayed.top1,
        "reuse_rate": replayed.reuse,
    }
    rounded: Numbers = {name: float(f"{value:.4g}") for name, value in numbers.items()}
    return {
        **rounded,
        "held_bytes": tuner.held(choice),
        "memory_bytes": tuner.goal.memory,
        "loss_bound": tuner.goal.loss,
        "context": len(tuner.text.prompts[0]),
        "disk": disk,
    }


def _table(result: PlanFile, choice: Choice) -> str:
    p, plan = result.predicted, result.plan
    assert plan.selection is not None
    s = plan.selection
    lines = [
        f"G {plan.group_tokens}, M {s.selected_groups}, C {s.reuse_slots}, r {s.rank}, lookahead {s.lookahead}, "
        f"refresh {choice.refresh}, tier {plan.tier}",
        *(f"{name:<16} {value}" for name, value in p.items()),
    ]
    return "\n".join(lines)


def _told(say: Talk) -> Any:
    def told(choice: Choice, loss: float, seconds: float) -> None:
        say(
            f"G {choice.group_tokens:2} M·G {choice.selected_tokens:4} C/M {choice.kept:4} r {choice.rank:3} "
            f"{choice.lookahead:5} every {choice.refresh}: loss {loss:.4f}, {seconds * 1e3:.1f} ms"
        )

    return told


def _device() -> str:
    """The name of the device at hand, on which everything was timed."""
    described = device_of_kind(jax.devices()[0].device_kind)
    return described.name if described is not None else jax.default_backend()


def _file_name(model: Model, device: str, plan: Plan, profile: str | None) -> str:
    disk = f"-{profile.partition('-')[0]}" if profile else ""
    return f"{model.name}-{device}-b{plan.batch}{disk}-tuned"


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tune.py",
        description="Tune a plan of policy `group`, and write it with what it promises.",
        epilog="Sizes: 512MiB = 512·2^20 bytes, 2GB = 2·10^9. Exit codes: 0 done, 2 usage, 1 failure.",
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="Hugging Face directory, hub id, GGUF file, or smollm2-135m")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    add("--batch", type=count, default=1, metavar="B", help="rows, the most that there will be (default 1)")
    add("--max-context", type=count, metavar="N", help="tokens per row (default: the model's limit)")
    add("--memory", type=_size, required=True, metavar="SIZE", help="for all but the weights")
    add(
        "--dram-memory",
        type=_size,
        metavar="SIZE",
        help="for whole rows in DRAM, beside that (default: none)",
    )
    add(
        "--loss",
        type=nats,
        default=0.05,
        metavar="NATS",
        help="most divergence per token from attending everything, on the texts given (default 0.05)",
    )
    add("--storage-profile", choices=tuple(PROFILES), help="plan for this disk instead of the store's")
    add(
        "--groups", type=counts, default=[2, 4, 8, 16], metavar="G[,G]", help="group sizes (default 2,4,8,16)"
    )
    add(
        "--texts", type=paths, metavar="FILE[,FILE]", help="calibration texts (default: Python's help topics)"
    )
    add("--rows", type=count, default=2, metavar="N", help="calibration rows (default 2)")
    add("--context", type=count, default=8192, metavar="N", help="tokens of each, at most (default 8192)")
    add("--tokens", type=count, default=32, metavar="N", help="that are decoded after them (default 32)")
    add("--store-dir", type=Path, metavar="DIR", help="on the disk to plan for, unless a profile is")
    add_tables_flags(parser)
    add("--out", type=Path, metavar="FILE", help="the plan (default: in plans/, named for model and device)")
    add("--check", action="store_true", help="then hold predictions against engines at other points")
    add("--quiet", action="store_true", help="nothing on stderr but errors and warnings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
