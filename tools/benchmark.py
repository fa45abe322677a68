"""Time a decode step under each cache policy, and of peers, in interleaved rounds of one process.

    python tools/benchmark.py --policies resident,layer --tier dram,disk --context 7680 --batch 1,4 \\
        --peers transformers,llama-cpp --json out.json
    python tools/benchmark.py --policies resident,group,quest,loki --kv-memory 1/13 --prompt-file one.txt,two.txt \\
        --batch 1,8 --storage-profile own,nvme-1.8GBps,emmc-250MBps --json out.json --plots plots
    python tools/benchmark.py --policies resident,group --peers transformers,llama-cpp --geometry smollm2-135m \\
        --weights random --prefill random --context 32768 --json out.json

Everything that decodes one (context, batch) under one storage profile is alive at once and takes a turn of some
steps per round, in an order that rotates, so that a noisy machine slows all alike; ratios are medians over rounds of
the two times in a round. Each peer tries all its settings before, in rounds of its own; the fastest of our precision
and the fastest of the others take part. Peers start from the same prefill as our engines, and follow the same text.

Prints Markdown tables, and a plot in plain characters where there is more than one context or batch; `--json` gets
everything. Exit codes: 0 done, 2 usage, 1 failure, 130 interrupted. What an interrupted run has measured stays in
OUT.parts, and the same command goes on from there, unless the code, its libraries, the model or the machine changed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import machine
from adapters import adapters_for
from benchmark_flags import make_parser
from benchmark_plots import plot_files, terminal
from benchmark_shapes import Setup, make_shape, measure_shape, steps_of
from benchmark_table import tables
from contenders import RANDOM_DEPTH
from floors import floors, growth
from kept_runs import KeptRuns
from outputs import check_json, make_directory
from peers import Peer, PeerUnavailable, make_peer
from plots import need_matplotlib
from policies import SELECTIVE
from random_adapters import random_adapters
from random_model import random_model
from windows import read_texts

from swapkv_jax import Plan, SwapKVError, UsageError, load_model
from swapkv_jax.interrupts import interruptible
from swapkv_jax.models import Model
from swapkv_jax.report import write_report
from swapkv_jax.store_paths import default_store_dir
from swapkv_jax.talk import Talk

SAY = Talk(quiet=False)
RANDOM_NOTE = (
    "random keys have no structure: a step selects other groups than the last, so reuse is lower and reads are more "
    "than with real text"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    args = make_parser().parse_args(argv)
    with interruptible():
        try:
            report = run(args)
        except SwapKVError as error:
            SAY.always(f"error: {error}")
            return error.exit_code
        except KeyboardInterrupt:
            SAY.always("interrupted; the same command goes on where it was")
            return 130
    print(tables(report))
    if plot := terminal(report):
        print(f"\n```text\n{plot}\n```")
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report, which is written to `args.json`, and plotted if that was asked for.

    Raises:
        SwapKVError: flags that cannot work, a model or tier that fails.
    """
    store_dir = _places(args)
    texts = read_texts(args.prompt_file, "--prompt-file") if args.prompt_file else None
    new = steps_of(args).new_tokens
    if args.weights == "random":
        model = random_model(args.model, args.dtype, max(args.context) + new)
    else:
        model = load_model(args.model, dtype=args.dtype)
    shapes = [
        make_shape(args, model, texts, context, batch)
        for context, batch in itertools.product(args.context, args.batch)
    ]
    plans = [plan for shape in shapes for _, plan in shape.plans]
    with ExitStack() as stack:
        peers, skipped = _peers(args.peers, model, store_dir, stack)
        if args.weights == "random":
            adapters = random_adapters(model)
        else:
            adapters = adapters_for(model, plans, args.adapter, SAY)
        setup = Setup(
            args=args,
            model=model,
            adapters=adapters,
            peers=peers,
            prefill=_prefill_kind(args, engines=len(shapes[0].plans)),
            store_dir=store_dir,
            say=SAY,
        )
        kept = KeptRuns(args.json, setup.common(), fresh=args.fresh)
        stack.callback(kept.leave_nothing_empty)
        facts = machine.facts(store_dir if any(plan.tier == "disk" for plan in plans) else None)
        measured = [measure_shape(setup, shape, kept) for shape in shapes]
    bandwidth = max(facts["memory_bytes_per_s"], *(found.memory_bytes_per_s for found in measured))
    rows = [row | floors(row, model, bandwidth) for found in measured for row in found.rows]
    for found in measured:
        skipped |= found.skipped
    report = {
        "machine": facts | {"memory_bytes_per_s": bandwidth},
        "model": model.name if args.weights == "random" else args.model,
        "dtype": args.dtype,
        "storage_profiles": args.storage_profile,
        "prefill": setup.prefill,
        "prompt": "random tokens" if texts is None else ", ".join(texts),
        "forced": texts is not None,
        "steps": args.steps,
        "burst": args.burst,
        "warm_up": steps_of(args).before,
        "random_reader": f"reads of single records at random places of the engine's own files, past the page cache, "
        f"{RANDOM_DEPTH} threads with one read each in flight",
        "skipped": skipped,
        "notes": _notes(args, setup, kept, plans),
        "kv_memory": args.kv_memory,
        "rows": rows,
        "trials": [row for found in measured for row in found.trials],
        "growth": growth(rows, bandwidth),
    }
    _write(report, args.json)
    if args.plots is not None:
        plot_files(report, args.plots)
    kept.forget()
    return report


def _places(args: argparse.Namespace) -> Path:
    """Makes sure that all that is written later can be; returns the store's directory."""
    check_json(args.json)
    store_dir = args.store_dir or default_store_dir()
    places = {"--store-dir": store_dir}
    if args.plots is not None:
        need_matplotlib()
        places["--plots"] = args.plots
    for flag, directory in places.items():
        make_directory(directory, flag)
    return store_dir


def _peers(
    names: Sequence[str], model: Model, store_dir: Path, stack: ExitStack
) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can take part, closed with `stack`, and why the others cannot."""
    peers: dict[str, Peer] = {}
    skipped = {}
    for name in names:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-peer-", dir=store_dir))
        try:
            peers[name] = make_peer(name, model, Path(scratch))
        except PeerUnavailable as reason:
            skipped[name] = f"skipped ({reason})"
            SAY.always(f"{name}: {skipped[name]}")
        else:
            stack.callback(peers[name].close)
    return peers, skipped


def _prefill_kind(args: argparse.Namespace, engines: int) -> str:
    if args.capture_dir is not None and args.prefill in ("real", "random"):
        raise UsageError("--capture-dir keeps what --prefill once computes; leave one of them out")
    several = engines > 1 or args.peers or len(args.storage_profile) > 1
    once = args.capture_dir is not None or (args.prompt_file is not None and several)
    return args.prefill or ("once" if once else "real")


def _notes(args: argparse.Namespace, setup: Setup, kept: KeptRuns, plans: Sequence[Plan]) -> list[str]:
    notes = []
    opening = max((plan.selection.opening for plan in plans if plan.selection is not None), default=0)
    if opening > steps_of(args).before:
        notes.append(
            f"some timed steps are among a generation's first {opening}, in which every layer selects: give "
            f"--warm-up {opening} for those after them"
        )
    if setup.prefill == "random" and set(SELECTIVE) & set(args.policies):
        notes.append(RANDOM_NOTE)
    if kept.reused:
        notes.append(f"{kept.reused} measurements are those of an earlier run that was interrupted")
    return notes


def _write(report: dict[str, Any], path: Path) -> None:
    try:
        write_report(report, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another --json") from None


if __name__ == "__main__":
    sys.exit(main())
