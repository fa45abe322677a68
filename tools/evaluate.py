"""What a plan loses against `resident`: on real texts, and at answering questions about them.

    python tools/evaluate.py --task text --texts novel.txt,essay.txt --rows 8 --context 7680 --json out.json
    python tools/evaluate.py --task needle --texts novel.txt --lengths 1024,8000 --selected-groups 72 --rank 24
    python tools/evaluate.py --task needle --kinds single,multikey,extraction --texts novel.txt --lengths 4096 \
        --policies group,quest,loki --kv-memory 1/34,1/13 --resume unfinished --plots plots

`resident` and every plan start from the same prefill, which is computed once. Exit codes: 0 done, 2 usage,
1 failure.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from adapters import adapters_for
from evaluation_flags import make_parser
from evaluation_plots import plot_report, terminal_plots
from evaluation_table import table
from needle_task import answer_questions
from outputs import check_json, make_directory
from parts import Parts
from plots import need_matplotlib
from policies import Choices, given_by_policy, policy_plan, sized
from selection_flags import given_choices, written
from tasks import Bench
from text_task import follow_texts
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
    parser = make_parser()
    args = parser.parse_args(argv)
    say = Talk(args.quiet)
    with warnings.catch_warnings(), interruptible():
        warnings.showwarning = lambda message, *_args, **_kwargs: say.always(f"warning: {message}")
        try:
            report = run(args, say)
            if args.json is not None:
                _write(args.json, report)
            if args.plots is not None:
                for path in plot_report(report, args.plots):
                    say(f"wrote {path}")
        except SwapKVError as error:
            say.always(f"{parser.prog}: error: {error}")
            return error.exit_code
        except KeyboardInterrupt:
            say.always(f"{parser.prog}: interrupted; {_what_is_kept(args)}")
            return 1
        except OSError as error:
            say.always(f"{parser.prog}: error: {error}; check that file or device")
            return 1
    print(table(report))
    if plots := terminal_plots(report):
        print(f"\n```\n{plots}\n```")
    return 0


def _what_is_kept(args: argparse.Namespace) -> str:
    if args.resume is not None:
        return f"the same command goes on with what {args.resume} keeps"
    kept = "" if args.capture_dir is None else f"; {args.capture_dir} keeps the prompts that were prefilled"
    return f"nothing was written{kept}"


def run(args: argparse.Namespace, say: Talk) -> dict[str, Any]:
    """The report of one task.

    Raises:
        SwapKVError: flags that cannot work, a model or tier that fails.
    """
    _check_outputs(args)
    texts = read_texts(args.texts, "--texts")
    store_dir = args.store_dir or default_store_dir()
    make_directory(store_dir, "--store-dir")
    platform = jax.default_backend()
    dtype: DType = args.dtype or ("float32" if platform == "cpu" else "bfloat16")
    with contextlib.ExitStack() as stack:
        parts = None if args.resume is None else stack.enter_context(Parts(args.resume))
        with say.bars() as progress:
            model = load_model(args.model, dtype, progress)
        choices = _choices(args, model, dtype)
        plans = {name: choice.plan for name, choice in choices.items()}
        adapters = adapters_for(model, plans.values(), args.adapter, say)

        def resize(name: str, plan: Plan) -> Plan:
            choice = choices[name]
            return (
                plan
                if choice.memory is None
                else sized(plan, model.geometry, choice.memory, fixed=choice.fixed)
            )

        bench = Bench(
            model=model,
            adapters=adapters,
            plans=plans,
            resize=resize,
            reference=make_plan(model.geometry, cache="resident", dtype=dtype, platform=platform),
            batch=args.batch,
            store_dir=store_dir,
            capture_dir=args.capture_dir,
            progress=stack.enter_context(say.bars()),
            parts=parts,
        )
        result = _result(args, bench, texts)
    return {
        "task": args.task,
        "model": model.name,
        "dtype": dtype,
        "texts": list(texts),
        "batch": args.batch,
        "kv_memory": args.kv_memory,
        "jax": jax.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **result,
    }


def _result(args: argparse.Namespace, bench: Bench, texts: Mapping[str, str]) -> dict[str, Any]:
    if args.task == "text":
        return follow_texts(bench, cut_windows(bench.model, texts, args.rows, args.context, args.tokens))
    return answer_questions(
        bench,
        texts,
        kinds=args.kinds,
        lengths=args.lengths,
        count=args.needles,
        seed=args.seed,
        chat=not args.raw,
    )


def _check_outputs(args: argparse.Namespace) -> None:
    """Raises UsageError if the report or its plots could not be written after all the work."""
    if args.json is not None:
        check_json(args.json)
    if args.plots is not None:
        need_matplotlib()
        make_directory(args.plots, "--plots")


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error.strerror}; choose another --json") from None


@dataclass(frozen=True)
class _Choice:
    """A plan to evaluate, whose batch and context are the task's; `memory` is the fraction of the whole KV's memory
    that it is to take, None for what it takes, and `fixed` what was chosen for it and stays."""

    plan: Plan
    memory: float | None = None
    fixed: Choices = field(default_factory=dict)


def _choices(args: argparse.Namespace, model: Model, dtype: DType) -> dict[str, _Choice]:
    """What to evaluate, by name."""
    if args.plan_json is not None:
        return {name: _Choice(plan) for name, plan in _given_plans(args, dtype).items()}
    choices: dict[str, _Choice] = {}
    memories = args.kv_memory or [None]
    for policy, memory in itertools.product(args.policies, memories):
        given = given_by_policy(args, memory).get(policy, {})
        plan = policy_plan(
            model.geometry,
            policy,
            given,
            batch=args.batch,
            dtype=dtype,
            platform=jax.default_backend(),
            capability=compute_capability(),
        )
        if plan.selection is None:
            choices[policy] = _Choice(plan)
        elif memory is None:
            choices[_name(plan) if policy == "group" else policy] = _Choice(plan)
        else:
            size = f" at {100 * memory:.3g} %" if len(memories) > 1 else ""
            choices[f"{policy}{size}"] = _Choice(plan, memory, given)
    return choices


def _given_plans(args: argparse.Namespace, dtype: DType) -> dict[str, Plan]:
    """Those of `--plan-json`, by the files' names."""
    if given_choices(args) or args.kv_dtype or args.set or args.settings or args.kv_memory is not None:
        raise UsageError(
            "--plan-json fixes what the selection flags, --kv-dtype, --set, --settings and --kv-memory would say; "
            "leave one of them out"
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


def _name(plan: Plan) -> str:
    """The sizes, and what else is not as usual. (Load sizes follow the batch and lose nothing.)"""
    s = plan.selection
    assert s is not None
    sizes = ("selected_groups", "reuse_slots", "rank")
    others = (field for field in s.__struct_fields__ if field not in (*sizes, "load_buckets", "strategy"))
    changed = [
        f" {field.replace('_', ' ')} {_brief(getattr(s, field))}"
        for field in others
        if getattr(s, field) != getattr(SELECTION, field)
    ]
    return f"group G{plan.group_tokens} M{s.selected_groups} C{s.reuse_slots} r{s.rank}" + "".join(changed)


def _brief(value: Any) -> str:
    """As `written`, with 30×8 for as many equal numbers in a row."""
    if not isinstance(value, tuple):
        return written(value)
    runs = [(number, len(list(same))) for number, same in itertools.groupby(value)]
    return ",".join(f"{count}×{number}" if count > 1 else str(number) for number, count in runs)


if __name__ == "__main__":
    sys.exit(main())
