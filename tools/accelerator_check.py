"""Check the accelerator at hand: kernels, policies, graphs, and how fast they are. At most eight minutes.

    python tools/accelerator_check.py                     # on a machine with a GPU or a TPU
    python tools/accelerator_check.py --json report.json
    python tools/accelerator_check.py --cpu               # tiny sizes on the CPU, kernels interpreted

Nothing is fetched: models have random weights. Every kernel is held against float64, every cache policy against
logits that another process computes on the CPU, every decode graph against the rules of tools/portability.py as the
device's own compiler makes it. Measured are the rates of memory and link, kernels beside the bandwidth of memory,
and the steps of every policy; on a GPU a profile counts the launches of CUDA graphs. The table comes last.

Exit codes: 0 nothing failed, 1 something did or there was no time for it, 2 usage (no accelerator is one).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerator_kernels as kernels
import accelerator_policies as policies
import jax
import numpy as np
from accelerator_findings import Finding, raised, table
from accelerator_replay import check_graphs
from flag_types import count

from swapkv_jax import SwapKVError, UsageError
from swapkv_jax.rates import DeviceRates, measure_device_rates
from swapkv_jax.talk import Talk

Part = Callable[[], Iterable[Finding]]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    started = time.perf_counter()
    parser = _parser()
    args = parser.parse_args(argv)
    say = Talk(args.quiet)
    try:
        if args.write_reference is not None:
            np.save(args.write_reference, policies.resident_logits(_exact(args.tiny)))
            return 0
        if args.cpu:
            jax.config.update("jax_platforms", "cpu")
        elif jax.default_backend() == "cpu":
            raise UsageError("there is no accelerator here; --cpu runs what a CPU can, at tiny sizes")
        findings = list(_run(args, started + 60 * args.minutes, say))
        if args.json is not None:
            _write(args.json, {**_device(), "findings": [finding.to_dict() for finding in findings]})
    except SwapKVError as error:
        say.always(f"{parser.prog}: error: {error}")
        return error.exit_code
    print(f"{_device()['kind']} ({_device()['backend']}), jax {jax.__version__}")
    print(table(findings))
    return 1 if any(finding.passed is False for finding in findings) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerator_check.py", description="Check the accelerator at hand, in at most eight minutes."
    )
    add = parser.add_argument
    add("--cpu", action="store_true", help="tiny sizes on the CPU instead, kernels interpreted")
    add("--minutes", type=count, default=8, metavar="N", help="start nothing later than this (default: 8)")
    add("--json", type=Path, metavar="FILE", help="write what was found as JSON")
    add("--quiet", action="store_true", help="nothing on stderr but errors")
    add(
        "--write-reference",
        type=Path,
        metavar="FILE",
        help="write the logits that others are held against, only",
    )
    add("--tiny", action="store_true", help="with --write-reference: those of --cpu")
    return parser


def _exact(tiny: bool) -> policies.Sizes:
    return policies.TINY if tiny else policies.EXACT


def _run(args: argparse.Namespace, deadline: float, say: Talk) -> Iterator[Finding]:
    """Part by part, the most telling first. One that raises has failed, and so has what there is no time for."""
    for name, part in _parts(args.cpu).items():
        say(f"{name} …")
        try:
            for finding in _until(deadline, part):
                say(f"  {finding.what}: {finding.found}")
                yield finding
        except TimeoutError:
            yield Finding(part=name, what="the rest", found=f"{args.minutes} minutes are over", passed=False)
        except Exception as error:
            yield raised(name, "the rest", error)


def _until(deadline: float, part: Part) -> Iterator[Finding]:
    """TimeoutError where the next one would start too late."""
    rest = iter(part())
    while True:
        if time.perf_counter() > deadline:
            raise TimeoutError
        try:
            yield next(rest)
        except StopIteration:
            return


def _parts(tiny: bool) -> dict[str, Part]:
    exact, timed = _exact(tiny), policies.TINY if tiny else policies.TIMED
    rates: list[DeviceRates] = []

    def measure() -> Iterator[Finding]:
        rates.append(measure_device_rates())
        for what in ("memory", "to_device", "from_device"):
            rate = getattr(rates[0], what)
            found = f"{rate / 1e9:.1f} GB/s"
            yield Finding(part="rate", what=what, found=found, passed=None, values={"bytes_per_s": rate})

    return {
        "kernel": lambda: kernels.check_kernels(
            kernels.TINY_FOR_ALL if tiny else kernels.CASES, interpreted=tiny
        ),
        "policy": lambda: policies.check_policies(exact, policies.reference(exact)),
        "graphs": lambda: check_graphs(policies.planners(timed), timed.geometry),
        "rate": measure,
        "kernel time": lambda: kernels.time_kernels(kernels.TINY if tiny else kernels.TIMED, rates[0].memory),
        "step": lambda: policies.time_policies(timed),
    }


def _device() -> dict[str, Any]:
    return {"kind": jax.devices()[0].device_kind, "backend": jax.default_backend(), "jax": jax.__version__}


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name a file that can be written") from None


if __name__ == "__main__":
    sys.exit(main())
