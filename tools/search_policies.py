"""Search each selecting policy's best parameters at equal memory: ours and the literature's, by the tuner's walk.

    python tools/search_policies.py --kv-memory 1/13 --batch 2 --context 4000 --texts novel.txt --json best.json
    python tools/benchmark.py --policies group,quest --kv-memory 1/13 --settings best.json --goal fastest ...

Per policy: walks to the setting that loses least against `resident`, then to the fastest that loses no more than
--loss, for which the machine must have nothing else to do (else --goals least-loss). What was measured is kept in
--tables, so that a run that was interrupted goes on where it was. Exit codes: 0 done, 2 usage, 1 failure.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from flag_types import add_tables_flags, count, names, nats, paths
from outputs import check_json, make_directory
from policies import parse_fraction, parse_settings
from policy_space import AXES, Setting, Space
from policy_trials import Bench, Trials, compiled_once
from search_table import milliseconds, table
from settings_file import GOALS, Goal, Outcome, Point, SettingsFile
from windows import cut_windows, read_texts

from swapkv_jax import PlanError, SwapKVError, UsageError, load_model
from swapkv_jax.calibration import default_text
from swapkv_jax.interrupts import interruptible
from swapkv_jax.models import Geometry
from swapkv_jax.planner import parse_size
from swapkv_jax.store_paths import default_store_dir
from swapkv_jax.talk import Talk
from swapkv_jax.tiers.throttled import PROFILES, storage_profile
from swapkv_jax.tuner.search import Walker, among_the_fastest, fastest, least_loss
from swapkv_jax.tuner.tables import Tables
from swapkv_jax.tuner.tune import Text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    say = Talk(args.quiet)
    with warnings.catch_warnings(), interruptible():
        warnings.showwarning = lambda message, *_args, **_kwargs: say.always(f"warning: {message}")
        try:
            print(table(run(args, say)))
        except SwapKVError as error:
            say.always(f"{parser.prog}: error: {error}")
            return error.exit_code
        except KeyboardInterrupt:
            say.always(f"{parser.prog}: interrupted; the same command goes on where it was")
            return 1
    return 0


def run(args: argparse.Namespace, say: Talk) -> SettingsFile:
    """Searches policy by policy, and writes what was found after each.

    Raises:
      SwapKVError: flags that cannot work, a model or tier that fails.
    """
    check_json(args.json)
    fixed = parse_settings(args.set)
    if unsearched := fixed.keys() - set(args.policies):
        raise UsageError(f"--set is for {min(unsearched)}, which is not searched; name it in --policies too")
    store_dir, tables = args.store_dir or default_store_dir(), Tables(args.tables, fresh=args.fresh)
    make_directory(store_dir, "--store-dir")
    with say.bars() as progress:
        model = load_model(args.model, args.dtype, progress)
    texts = read_texts(args.texts, "--texts") if args.texts else {"default": default_text()}
    windows = cut_windows(model, texts, args.rows or args.batch, args.context, args.tokens)
    text = Text(
        prompts=[window.prompt for window in windows],
        following=[window.following for window in windows],
        directory=args.tables / "prefills",
    )
    found: dict[str, Outcome] = {}
    bound = args.loss if GOALS[1] in args.goals else None
    with say.bars() as progress, compiled_once(args.tables / "compiled"):
        bench = Bench(
            model=model,
            text=text,
            batch=args.batch,
            store_dir=store_dir,
            profile=None if args.storage_profile is None else storage_profile(args.storage_profile),
            tables=tables,
            timed=bound is not None,
            progress=progress,
        )
        memory = _fraction(args.kv_memory, model.geometry, bench)
        result = SettingsFile(
            model=model.name,
            dtype=args.dtype,
            kv_memory=memory,
            memory=args.kv_memory,
            context=args.context,
            batch=args.batch,
            rows=len(windows),
            tokens=args.tokens,
            texts=tuple(texts),
            storage_profile=args.storage_profile,
            loss=bound,
            machine=bench.machine,
            policies=found,
        )
        for policy in args.policies:
            space = Space.of(policy, model.geometry, memory, fixed=fixed.get(policy), **bench.request)
            trials = Trials(bench, space)
            found[policy] = search_policy(
                space, trials, loss=bound, limit=args.limit, told=_told(policy, trials, say)
            )
            try:
                args.json.write_bytes(result.to_json())
            except OSError as error:
                raise UsageError(
                    f"cannot write {args.json}: {error.strerror}; choose another --json"
                ) from None
    return result


def search_policy(
    space: Space,
    trials: Trials,
    *,
    loss: float | None,
    limit: int,
    told: Callable[[Setting, float, float], None] | None = None,
) -> Outcome:
    """The best settings of a space, by both goals.

    Every group size's start is tried. From there walks lead to the least loss, the best start's first; then, from
    each size's fastest that keeps the bound, to the fastest.

    Args:
      loss: the bound of goal `fastest`, None to leave that goal out. limit: most settings that are tried for each
        goal.
    """
    try:
        starts = space.starts()
    except PlanError as error:
        return Outcome(best={}, points=(), notes=(str(error),))
    walker = Walker(trials, space.neighbours, progress=told)
    for start in sorted(starts[:limit], key=lambda setting: walker.measure(setting).loss):
        walker.descend(start, least_loss(trials.guess_loss), limit=limit)
    measured, notes = walker.measured, []
    first = min(measured, key=lambda setting: measured[setting])
    best: dict[Goal, Setting] = {GOALS[0]: first}
    least = measured[first].loss
    if loss is not None and least > loss:
        notes.append(f"no setting loses as little as {loss:g} nats per token; the least found is {least:.3g}")
    elif loss is not None:
        allowed = [setting for setting, cost in measured.items() if cost.loss <= loss]
        quickest: dict[int, Setting] = {}
        for setting in sorted(allowed, key=lambda setting: measured[setting].seconds):
            quickest.setdefault(setting.group_tokens, setting)
        most = len(measured) + limit
        for start in quickest.values():
            walker.descend(start, fastest(loss, trials.guess_seconds), limit=most)
        best[GOALS[1]] = among_the_fastest(measured, loss)
    if walker.stopped:
        notes.append(f"the search ended at its limit of {limit} settings for a goal; others are untried")

    def point(setting: Setting) -> Point:
        return Point(choices=_plain(space.chosen(setting)), trial=trials.trial(setting))

    return Outcome(
        best={goal: point(setting) for goal, setting in best.items()},
        points=tuple({space.plan(setting): point(setting) for setting in measured}.values()),
        notes=tuple(notes),
    )


def _plain(choices: Mapping[str, Any]) -> dict[str, Any]:
    return msgspec.to_builtins(dict(choices))


def _fraction(memory: str, geometry: Geometry, bench: Bench) -> float:
    """--kv-memory as a fraction of the whole KV's bytes, of all rows at their full length.

    Raises:
      UsageError: it is neither a fraction nor a size.
    """
    try:
        return parse_fraction(memory)
    except argparse.ArgumentTypeError:
        pass
    try:
        size = parse_size(memory)
    except UsageError:
        raise UsageError(
            f"--kv-memory {memory} is neither a fraction nor a size; use one like 1/13, 0.077 or 64MiB"
        ) from None
    whole = bench.batch * bench.max_context * geometry.kv_bytes_per_token(bench.itemsize)
    if not 0 < size <= whole:
        raise UsageError(f"--kv-memory {memory} is not a part of the whole KV's {whole} bytes; give it less")
    return size / whole


def _told(policy: str, trials: Trials, say: Talk) -> Callable[[Setting, float, float], None]:
    def told(setting: Setting, loss: float, seconds: float) -> None:
        trial = trials.trial(setting)
        fields = " ".join(f"{name} {value}" for name, value in msgspec.structs.asdict(setting).items())
        say(
            f"{policy}: {fields}, M {trial.selected_groups} C {trial.reuse_slots}: loss {loss:.4f}, "
            f"top-1 {trial.top1:.0%}, {milliseconds(trial)} ms"
        )

    return told


# ---- flags ---------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="search_policies.py",
        description="Search the best parameters of policies that select, all at the same memory, on real texts.",
        epilog="Exit codes: 0 done, 2 usage, 1 failure.",
    )
    add = parser.add_argument
    add("--policies", type=names("policy", tuple(AXES)), default=list(AXES), metavar="NAME[,NAME]")
    add(
        "--kv-memory",
        required=True,
        metavar="FRACTION|SIZE",
        help="for each: a fraction of the whole KV's bytes (1/13, 0.077), or a size (64MiB)",
    )
    add(
        "--goals",
        type=names("goal", GOALS),
        default=list(GOALS),
        metavar="NAME[,NAME]",
        help="least-loss, which is always searched, and fastest, which needs a machine that does nothing else "
        "(default both)",
    )
    add("--loss", type=nats, default=0.1, metavar="NATS", help="bound of the fastest (default 0.1)")
    add("--limit", type=count, default=40, metavar="N", help="most settings tried, per policy and goal (40)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="POLICY.FIELD=VALUE",
        help="what every setting of a policy is to have, as quest.replacement=all; may be given several times",
    )
    add("--json", type=Path, required=True, metavar="OUT", help="what --settings of other tools takes")
    add("--model", default="smollm2-135m", help="Hugging Face directory, hub id, GGUF file, or smollm2-135m")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    add("--batch", type=count, default=2, metavar="B", help="rows decoded together (default 2)")
    add("--context", type=count, default=4000, metavar="N", help="tokens of each prompt (default 4000)")
    add("--rows", type=count, metavar="N", help="rows of text, a multiple of --batch (default: as many)")
    add("--tokens", type=count, default=16, metavar="N", help="compared and timed per row (default 16)")
    add("--texts", type=paths, metavar="FILE[,FILE]", help="real texts (default: Python's help topics)")
    add("--storage-profile", choices=tuple(PROFILES), help="read as if from this disk")
    add("--store-dir", type=Path, metavar="DIR", help="where engines keep KV while they run")
    add_tables_flags(parser)
    add("--quiet", action="store_true", help="nothing on stderr but errors and warnings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
