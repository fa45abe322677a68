"""What a plan loses against `resident`: on real texts, and at finding needles in them.

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
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from adapters import adapters_for
from evaluation_table import table
from flag_types import count, counts, names, paths
from policies import POLICIES, add_policy_flags, parse_settings, policy_plan, sized
from selection_flags import add_selection_flags, given_choices, written
from tasks import Bench, find_needles, follow_texts
from windows import cut_windows, read_texts

from swapkv_jax import ModelError, Plan, PlanError, SwapKVError, UsageError, load_model, make_plan
from swapkv_jax.interrupts import interruptible
from swapkv_jax.models import Model
from swapkv_jax.plan import DType
from swapkv_jax.plan_files import load_plan
from swapkv_jax.planner import SELECTION
from swapkv_jax.staging import compute_capability
from swapkv_jax.store_paths import default_store_dir
from swapkv_jax.talk import Talk


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
    texts = read_texts(args.texts, "--texts")
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
    adapters = adapters_for(model, plans.values(), args.adapter, say)
    with say.bars() as progress:
        bench = Bench(
            model=model,
            adapters=adapters,
            plans=plans,
            resize=_resize(args, model),
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
        "jax": jax.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **result,
    }


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}; choose another --json") from None


def _plans(args: argparse.Namespace, model: Model, dtype: DType) -> dict[str, Plan]:
    """The plans to evaluate, by name. Batch and context are the task's."""
    if args.plan_json is None:
        plans = {}
        for policy in args.policies:
            plan = policy_plan(
                model.geometry,
                policy,
                _given(args).get(policy, {}),
                batch=args.batch,
                dtype=dtype,
                platform=jax.default_backend(),
                capability=compute_capability(),
            )
            by_sizes = policy == "group" and args.kv_memory is None
            plans[_name(plan) if by_sizes else policy] = plan
        return plans
    if given_choices(args) or args.set or args.kv_memory is not None:
        raise UsageError(
            "--plan-json fixes what the selection flags, --set and --kv-memory would say; leave one of them out"
        )
    plans = {}
    for path in args.plan_json:
        plan = load_plan(str(path))
        if plan.dtype != dtype:
            raise PlanError(f"{path} is a plan for {plan.dtype}, the model is in {dtype}; match --dtype")
        if path.stem in plans:
            raise UsageError(f"--plan-json names {path.stem} twice; give each plan a name of its own")
        plans[path.stem] = plan
    return plans


def _given(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Choices by policy: the selection flags are those of `group`."""
    given = parse_settings(args.set)
    given["group"] = given_choices(args) | given.get("group", {})
    return given


def _resize(args: argparse.Namespace, model: Model) -> Callable[[Plan], Plan] | None:
    """What makes every selecting plan take `--kv-memory`, once a task has said its batch and context."""
    if args.kv_memory is None:
        return None
    given = _given(args)

    def resize(plan: Plan) -> Plan:
        if plan.selection is None:
            return plan
        name = plan.selection.strategy_name
        fixed = given.get("group" if name == "kvswap" else name, {})
        return sized(plan, model.geometry, args.kv_memory, fixed=fixed)

    return resize


def _name(plan: Plan) -> str:
    """The sizes, and what else is not as usual. (Load sizes follow the batch and lose nothing.)"""
    s = plan.selection
    assert s is not None
    sizes = ("selected_groups", "reuse_slots", "rank")
    others = (field for field in s.__struct_fields__ if field not in (*sizes, "load_buckets", "strategy"))
    changed = [
        f" {field.replace('_', ' ')} {written(getattr(s, field))}"
        for field in others
        if getattr(s, field) != getattr(SELECTION, field)
    ]
    return f"group G{plan.group_tokens} M{s.selected_groups} C{s.reuse_slots} r{s.rank}" + "".join(changed)


# ---- flags ---------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description="What plans of policy `group`, and of the literature's, lose against `resident`, from the same "
        "prefill.",
        epilog="A captured prefill takes 46,080 bytes of disk per token for smollm2-135m in float32: 8 rows of 7,680 "
        "tokens 2.8 GB, 20 needles of 8,000 tokens 7.4 GB (one length at a time, unless they are kept). "
        "Task text also keeps resident's logits in memory: 197 kB per token of --rows × --tokens.",
    )
    add = parser.add_argument
    add("--task", choices=["text", "needle"], required=True)
    add("--texts", type=paths, required=True, metavar="FILE[,FILE]", help="real texts, not calibration's")
    add("--model", default="smollm2-135m", help="Hugging Face directory, hub id, GGUF file, or smollm2-135m")
    add(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: float32 on a CPU, else bfloat16"
    )
    add("--batch", type=count, default=4, metavar="B", help="rows decoded together (default 4)")
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
        "--rows", type=count, default=8, metavar="N", help="windows, over all texts (default 8)"
    )
    text.add_argument("--context", type=count, default=7680, metavar="N", help="tokens before (default 7680)")
    text.add_argument("--tokens", type=count, default=128, metavar="N", help="compared per row (default 128)")

    needle = parser.add_argument_group("task needle")
    needle.add_argument(
        "--lengths",
        type=counts,
        default=[1024, 2048, 4096, 8000],
        metavar="N[,N]",
        help="tokens of a prompt",
    )
    needle.add_argument("--needles", type=count, default=20, metavar="N", help="per length (default 20)")
    needle.add_argument("--seed", type=_seed, default=0, help="of keys, numbers and places (default 0)")
    needle.add_argument("--raw", action="store_true", help="ask in plain text, not in the chat template")

    plan = parser.add_argument_group(
        "the plan", "Flags for one plan, or files for several; batch and context are always the task's."
    )
    plan.add_argument("--plan-json", type=paths, metavar="FILE[,FILE]", help="plans to compare")
    plan.add_argument(
        "--policies",
        type=names("policy", POLICIES[1:]),
        default=["group"],
        metavar="NAME[,NAME]",
        help=f"without plans: those of {', '.join(POLICIES[1:])} (default group)",
    )
    add_selection_flags(plan)
    add_policy_flags(plan)
    return parser


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
