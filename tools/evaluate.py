"""What a plan of policy `group` loses against `resident`: on real texts, and at finding needles in them.

    python tools/evaluate.py --task text --texts novel.txt,essay.txt --rows 8 --context 7680 --json out.json
    python tools/evaluate.py --task needle --texts novel.txt --lengths 1024,8000 --selected-groups 72 --rank 24

`resident` and every plan start from the same prefill, which is computed once. Exit codes: 0 done, 2 usage,
1 failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import msgspec
from evaluation_table import table
from tasks import Bench, cut_windows, find_needles, follow_texts

from swapkv_jax import ModelError, Plan, PlanError, SwapKVError, UsageError, load_model, make_plan
from swapkv_jax.adapter import Adapter
from swapkv_jax.calibration import ensure_adapter
from swapkv_jax.interrupts import interruptible
from swapkv_jax.models import Model
from swapkv_jax.plan import DType
from swapkv_jax.planner import SELECTION
from swapkv_jax.selection import Selection
from swapkv_jax.store_paths import default_store_dir
from swapkv_jax.talk import Talk

GROUP_TOKENS = 4
# Flag → field of `Selection`.
_SELECTION = {
    "selected_groups": "selected_groups",
    "reuse_slots": "reuse_slots",
    "rank": "rank",
    "sink": "sink_groups",
    "recent": "recent_groups",
    "aggregate": "aggregate",
    "lookahead": "lookahead",
    "replacement": "replacement",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    say = Talk(args.quiet)
    with warnings.catch_warnings(), interruptible():
        warnings.showwarning = lambda message, *_args, **_kwargs: say.always(f"warning: {message}")
        try:
            report = run(args, say)
            if args.json is not None:
                _write(args.json, report)
        except SwapKVError as error:
            say.always(f"{parser.prog}: error: {error}")
            return error.exit_code
        except KeyboardInterrupt:
            kept = f"; {args.capture_dir} keeps the prompts that were prefilled" if args.capture_dir else ""
            say.always(f"{parser.prog}: interrupted; nothing was written{kept}")
            return 1
        except OSError as error:
            say.always(f"{parser.prog}: error: {error}; check that file or device")
            return 1
    print(table(report))
    return 0


def run(args: argparse.Namespace, say: Talk) -> dict[str, Any]:
    """The report of one task.

    Raises:
        SwapKVError: flags that cannot work, a model or tier that fails.
    """
    if args.json is not None and (not os.access(args.json.parent, os.W_OK) or args.json.is_dir()):
        raise UsageError(f"cannot write {args.json}; give --json a file in a directory that is writable")
    texts = {path.name: _read(path) for path in args.texts}
    if len(texts) < len(args.texts):
        raise UsageError("--texts names two files alike; give each text once")
    store_dir = args.store_dir or default_store_dir()
    try:
        store_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {store_dir}: {error.strerror}; choose another --store-dir") from None
    platform = jax.default_backend()
    dtype: DType = args.dtype or ("float32" if platform == "cpu" else "bfloat16")
    with say.bars() as progress:
        model = load_model(args.model, dtype, progress)
    plans = _plans(args, model, dtype)
    adapter = _adapter(args.adapter, model, plans, say)
    with say.bars() as progress:
        bench = Bench(
            model=model,
            adapter=adapter,
            plans=plans,
            reference=make_plan(model.geometry, cache="resident", dtype=dtype, platform=platform),
            batch=args.batch,
            store_dir=store_dir,
            capture_dir=args.capture_dir,
            progress=progress,
        )
        if args.task == "text":
            windows = cut_windows(model, texts, args.rows, args.context, args.tokens)
            result = follow_texts(bench, windows)
        else:
            result = find_needles(
                bench, texts, lengths=args.lengths, count=args.needles, seed=args.seed, chat=not args.raw
            )
    return {
        "task": args.task,
        "model": model.name,
        "dtype": dtype,
        "texts": list(texts),
        "batch": args.batch,
        "adapter_text_digest": None if adapter is None else adapter.text_digest,
        "jax": jax.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **result,
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"cannot read {path}: {reason}; give --texts UTF-8 texts") from None


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}; choose another --json") from None


def _plans(args: argparse.Namespace, model: Model, dtype: DType) -> dict[str, Plan]:
    """The plans to evaluate, by name. Batch and context are the task's."""
    given = {field: value for flag, field in _SELECTION.items() if (value := getattr(args, flag)) is not None}
    if args.plan_json is None:
        choice = msgspec.structs.replace(SELECTION, **given)
        if args.reuse_slots is None:
            choice = msgspec.structs.replace(
                choice, reuse_slots=max(choice.reuse_slots, choice.selected_groups)
            )
        plan = make_plan(
            model.geometry,
            cache="group",
            dtype=dtype,
            group_tokens=args.group_tokens or GROUP_TOKENS,
            selection=choice,
            platform=jax.default_backend(),
        )
        return {_name(plan.group_tokens, choice): plan}
    if given or args.group_tokens is not None:
        raise UsageError("--plan-json fixes what the selection flags would say; leave one of them out")
    plans = {}
    for path in args.plan_json:
        try:
            plan = Plan.from_json(path.read_bytes(), source=str(path))
        except OSError as error:
            raise PlanError(f"cannot read plan {path}: {error.strerror}; check the path") from None
        if plan.dtype != dtype:
            raise PlanError(f"{path} is a plan for {plan.dtype}, the model is in {dtype}; match --dtype")
        if path.stem in plans:
            raise UsageError(f"--plan-json names {path.stem} twice; give each plan a name of its own")
        plans[path.stem] = plan
    return plans


def _name(group_tokens: int, s: Selection) -> str:
    return (
        f"group G{group_tokens} M{s.selected_groups} C{s.reuse_slots} r{s.rank} sink {s.sink_groups} recent "
        f"{s.recent_groups} {s.aggregate} {s.lookahead} {s.replacement}"
    )


def _adapter(place: Path | None, model: Model, plans: dict[str, Plan], say: Talk) -> Adapter | None:
    if all(plan.policy != "group" for plan in plans.values()):
        return None
    if place is not None:
        return Adapter.load(place, model.fingerprint)
    with say.bars() as progress:
        adapter, note = ensure_adapter(model, progress=progress)
    say(note)
    return adapter


# ---- flags ---------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description="What plans of policy `group` lose against `resident`, from the same prefill.",
        epilog="A captured prefill takes 46,080 bytes of disk per token for smollm2-135m in float32: 8 rows of 7,680 "
        "tokens 2.8 GB, 20 needles of 8,000 tokens 7.4 GB (one length at a time, unless they are kept). "
        "Task text also keeps resident's logits in memory: 197 kB per token of --rows × --tokens.",
    )
    add = parser.add_argument
    add("--task", choices=["text", "needle"], required=True)
    add("--texts", type=_paths, required=True, metavar="FILE[,FILE]", help="real texts, not calibration's")
    add("--model", default="smollm2-135m", help="Hugging Face directory, hub id, GGUF file, or smollm2-135m")
    add(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: float32 on a CPU, else bfloat16"
    )
    add("--batch", type=_count, default=4, metavar="B", help="rows decoded together (default 4)")
    add("--adapter", type=Path, metavar="DIR", help="default: the one kept for the model, made if need be")
    add("--store-dir", type=Path, metavar="DIR", help="for the disk tier and captured prefills")
    add(
        "--capture-dir",
        type=Path,
        metavar="DIR",
        help="keep captured prefills here, and use those that are here",
    )
    add("--json", type=Path, metavar="FILE", help="write the report, by row or needle, as JSON")
    add("--quiet", action="store_true", help="nothing on stderr but errors and warnings")

    text = parser.add_argument_group("task text")
    text.add_argument(
        "--rows", type=_count, default=8, metavar="N", help="windows, over all texts (default 8)"
    )
    text.add_argument(
        "--context", type=_count, default=7680, metavar="N", help="tokens before (default 7680)"
    )
    text.add_argument(
        "--tokens", type=_count, default=128, metavar="N", help="compared per row (default 128)"
    )

    needle = parser.add_argument_group("task needle")
    needle.add_argument(
        "--lengths",
        type=_counts,
        default=[1024, 2048, 4096, 8000],
        metavar="N[,N]",
        help="tokens of a prompt",
    )
    needle.add_argument("--needles", type=_count, default=20, metavar="N", help="per length (default 20)")
    needle.add_argument("--seed", type=_seed, default=0, help="of keys, numbers and places (default 0)")
    needle.add_argument("--raw", action="store_true", help="ask in plain text, not in the chat template")

    plan = parser.add_argument_group(
        "the plan", "Flags for one plan, or files for several; batch and context are always the task's."
    )
    plan.add_argument("--plan-json", type=_paths, metavar="FILE[,FILE]", help="plans to compare")
    add = plan.add_argument
    add("--selected-groups", type=_count, metavar="M", help=f"default {SELECTION.selected_groups}")
    add("--reuse-slots", type=_count, metavar="C", help=f"default {SELECTION.reuse_slots}, but at least M")
    add("--rank", type=_count, metavar="R", help=f"default {SELECTION.rank}")
    add("--group-tokens", type=_count, metavar="G", help=f"default {GROUP_TOKENS}")
    add(
        "--sink",
        type=int,
        metavar="N",
        help=f"first groups always selected (default {SELECTION.sink_groups})",
    )
    add(
        "--recent",
        type=int,
        metavar="N",
        help=f"last groups always selected (default {SELECTION.recent_groups})",
    )
    add("--aggregate", choices=["sum", "softmax"], help=f"default {SELECTION.aggregate}")
    add("--lookahead", choices=["step", "layer"], help=f"default {SELECTION.lookahead}")
    add("--replacement", choices=["fifo", "lru"], help=f"default {SELECTION.replacement}")
    return parser


def _paths(text: str) -> list[Path]:
    return [Path(part) for part in text.split(",")]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _counts(text: str) -> list[int]:
    return list(dict.fromkeys(_count(part) for part in text.split(",")))


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
