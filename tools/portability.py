"""Compile a plan's decode graphs for TPUs and GPUs that are not here, and check what comes out.

    python tools/portability.py                                        # all built-in models, plans, targets
    python tools/portability.py --model llama-3.1-8b --plans group --targets v5e,h100
    python tools/portability.py --model path/config.json --plan plan.json --targets cpu --json report.json
    python tools/portability.py --markdown tools/portability.md                # all, as that page has it

Every graph that a decode step runs is traced, held against rules for its platform (no callback, no dynamic shape; on
a GPU no loop and no host memory), exported, compiled ahead of time, and held against the plan: device and host bytes,
donated buffers that come back in place, the kernels that the plan names and no others, on a GPU one command buffer.
Compilers come with the extras `aot-tpu` and `aot-cuda`; a target whose compiler is missing is only linted and
exported, and reported as skipped.

Exit codes: 0 nothing failed, 1 something did, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from flag_types import count
from portability_bytes import plan_bytes
from portability_graph import Checker, GraphReport, can_serialise, holds_kernel, names
from portability_markdown import page
from portability_models import DEFAULT_PLANS, MODELS, PLANS, Subject, plan_for, read_plan, subject
from portability_table import table
from portability_targets import TARGETS, Target, compilers

from swapkv_jax import PlanError, SwapKVError, UsageError
from swapkv_jax.attention_choice import MIN_CAPABILITY, check_capability
from swapkv_jax.plan import Plan
from swapkv_jax.planner import weight_bytes
from swapkv_jax.program import decode_specs
from swapkv_jax.sampling import Sampling
from swapkv_jax.talk import Talk

SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_k=40, top_p=0.95))  # a head each


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    say = Talk(args.quiet)
    jax.config.update("jax_platforms", "cpu")  # nothing runs: an accelerator that is here stays others'
    try:
        report = _report(args, say)
        if args.json is not None:
            _write(args.json, json.dumps(report, indent=1) + "\n")
        if args.markdown is not None:
            _write(args.markdown, page(report))
    except SwapKVError as error:
        say.always(f"{parser.prog}: error: {error}")
        return error.exit_code
    print(table(report))
    return 1 if report["counts"]["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="portability.py", description="Compile a plan's decode graphs for devices that are not here."
    )
    add = parser.add_argument
    add(
        "--model",
        action="append",
        metavar="NAME",
        help=f"{', '.join(MODELS)}, or a Hugging Face config.json; may be repeated (default: the built-in ones)",
    )
    add(
        "--plans",
        type=_names_of(PLANS),
        default=list(DEFAULT_PLANS),
        metavar="LIST",
        help=f"of {','.join(PLANS)} (default: {','.join(DEFAULT_PLANS)}; group: by a platform's kernel)",
    )
    add(
        "--plan",
        type=Path,
        metavar="FILE",
        help="this plan of the one --model instead; it must fit every target",
    )
    add(
        "--targets",
        type=_names_of(tuple(TARGETS)),
        default=list(TARGETS),
        metavar="LIST",
        help=f"of {','.join(TARGETS)} (default: all)",
    )
    add("--batch", type=count, metavar="N", help="rows of the plans (default: by model)")
    add("--context", type=count, metavar="N", help="tokens per row (default: by model)")
    add("--artefacts", type=Path, metavar="DIR", help="write the exported graphs here, one per platform")
    add("--json", type=Path, metavar="FILE", help="write the report, by graph, as JSON")
    add("--markdown", type=Path, metavar="FILE", help="write the report as a page of documentation")
    add("--quiet", action="store_true", help="nothing on stderr but errors")
    return parser


def _names_of(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        chosen = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return chosen

    return parse


def _report(args: argparse.Namespace, say: Talk) -> dict[str, Any]:
    subjects = [subject(name, args.batch, args.context) for name in args.model or MODELS]
    if args.plan is not None and len(subjects) != 1:
        raise UsageError("--plan is for one model; name it with --model")
    if args.artefacts is not None:
        if not can_serialise():
            raise UsageError("--artefacts needs the package flatbuffers; install extra aot-tpu or aot-cuda")
        _make_directory(args.artefacts)
    targets = [TARGETS[name] for name in args.targets]
    here, apart = by_process(targets)
    skipped = {t.name: f"skipped ({reason})" for t in targets if (reason := t.missing())}
    checkers: dict[str, Checker | str] = {target.name: _checker(target) for target in here}
    rows = []
    for chosen, label, plan, target in _cases(args, subjects, here):
        say(f"{chosen.name} {label} {target.name}")
        checker = checkers[target.name]
        rows.append(
            _row(chosen, label, plan, target, checker, args.artefacts, must_fit=args.plan is not None)
        )
    for others in apart:
        say(f"{', '.join(target.name for target in others)}, in a process of their own")
        rows += _rows_of_a_process(args, others)
    models = [chosen.name for chosen in subjects]
    labels = args.plans if args.plan is None else [args.plan.name]
    order = (models, labels, args.targets)
    rows.sort(
        key=lambda row: [
            of.index(row[key]) for of, key in zip(order, ("model", "plan", "target"), strict=True)
        ]
    )
    statuses = [row["status"] for row in rows]
    return {
        "jax": jax.__version__,
        "compilers": compilers(),
        "rows": rows,
        "skipped": skipped,
        "notes": []
        if can_serialise()
        else ["artefacts were exported but not serialised (install flatbuffers)"],
        "counts": {name: statuses.count(name) for name in ("passed", "failed", "too large", "skipped")},
    }


def by_process(targets: Sequence[Target]) -> tuple[list[Target], list[list[Target]]]:
    """Targets to compile for in this process, and those of each further one: the compiler of GPU kernels keeps the
    generation that a process asked it for first, and takes every later GPU for one of those."""
    here: list[Target] = []
    generations: dict[int, list[Target]] = {}
    for target in targets:
        if target.missing() or target.capability is None or target.capability < MIN_CAPABILITY:
            here.append(target)
        else:
            generations.setdefault(int(target.capability), []).append(target)
    first, *others = [*generations.values()] or [[]]
    return [*here, *first], others


def _rows_of_a_process(args: argparse.Namespace, targets: list[Target]) -> list[dict[str, Any]]:
    flags = [
        "--targets",
        ",".join(target.name for target in targets),
        "--plans",
        ",".join(args.plans),
        "--quiet",
    ]
    flags += [flag for name in args.model or () for flag in ("--model", name)]
    for name in ("plan", "batch", "context", "artefacts"):
        value = getattr(args, name)
        flags += [] if value is None else [f"--{name}", str(value)]
    with tempfile.TemporaryDirectory(prefix="portability-") as directory:
        out = Path(directory, "report.json")
        command = [sys.executable, __file__, *flags, "--json", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if not out.exists():
            why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise SwapKVError(
                f"the process for {flags[1]} ended with {done.returncode}: {why}; run it by --targets alone"
            )
        return json.loads(out.read_text())["rows"]


def _cases(
    args: argparse.Namespace, subjects: list[Subject], targets: list[Target]
) -> Iterator[tuple[Subject, str, Plan, Target]]:
    for chosen in subjects:
        for label in args.plans if args.plan is None else [args.plan.name]:
            for target in targets:
                plan = plan_for(label, chosen, target) if args.plan is None else read_plan(args.plan)
                yield chosen, label, plan, target


def _checker(target: Target) -> Checker | str:
    """What checks graphs on a target, or why its compiler is no use."""
    try:
        return Checker(target)
    except Exception as error:  # whatever its plugin raises: the target cannot be checked, and is no pass
        return f"its compiler cannot be set up: {str(error).strip().partition(chr(10))[0]}"


def _row(
    chosen: Subject,
    label: str,
    plan: Plan,
    target: Target,
    checker: Checker | str,
    artefacts: Path | None,
    *,
    must_fit: bool,
) -> dict[str, Any]:
    """A plan on a target. `must_fit`: graphs that are too large, and a plan that is, count as failures."""
    geometry = chosen.geometry
    failures: list[str] = []
    graphs: list[GraphReport] = []
    try:
        check_capability(plan.attention, target.capability)
    except PlanError as error:
        checker = str(error)  # a compiler that is asked for what its GPU lacks ends the process
    if isinstance(checker, str):
        failures.append(checker)
    else:
        specs = decode_specs(plan, geometry, SAMPLINGS)
        for name, spec in zip(names(specs), specs, strict=True):
            file = f"{chosen.name}.{label.replace('/', '-')}.{name}.{target.platform}.jax_export"
            artefact = artefacts and artefacts / file
            graphs.append(checker.check(name, spec, kernel=holds_kernel(plan, spec), artefact=artefact))
    weights, memory = weight_bytes(geometry, plan.dtype), plan.memory(geometry)
    needed = memory.device + memory.prefill + weights
    fits = target.memory is None or needed <= target.memory
    if must_fit and not fits:
        failures.append(f"the plan needs {needed:,} bytes of one device, which has {target.memory:,}")
    made = [graph.compiled for graph in graphs if graph.compiled is not None and graph.has_bytes]
    temporaries = max((m.temporaries or 0 for m in made), default=0)
    whole = bool(made) and len(made) == len(graphs)
    held = plan_bytes(plan, geometry, [m.taken for m in made], temporaries) if whole else None
    failures += held.problems if held is not None else ()
    return {
        "model": chosen.name,
        "plan": label,
        "plan_hash": plan.hash,
        "policy": plan.policy,
        "attention": plan.attention,
        "batch": plan.batch,
        "context": plan.max_context,
        "dtype": plan.dtype,
        "target": target.name,
        "status": _status(graphs, failures, target.missing() is not None),
        "failures": failures,
        "fits": fits,
        "planned": memory.device + memory.aliased if held is None else held.planned,
        "compiled": None if held is None else held.compiled,
        "unplanned": None if held is None else held.unplanned,
        "prefill": memory.prefill,
        "weights": weights,
        "temporaries": held.temporaries if held is not None else temporaries if made else None,
        "device_memory": target.memory,
        "graphs": [graph.to_dict() for graph in graphs],
    }


def _status(graphs: list[GraphReport], failures: list[str], missing: bool) -> str:
    if failures or any(graph.to_dict()["failures"] for graph in graphs):
        return "failed"
    if missing:
        return "skipped"
    return "too large" if any(g.compiled and g.compiled.too_large for g in graphs) else "passed"


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a directory that can be written") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a file that can be written") from None


if __name__ == "__main__":
    sys.exit(main())
