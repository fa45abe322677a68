"""Whether the decode graphs of the device at hand are what portability asks of them, and are replayed as such."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from accelerator_findings import Finding
from portability_bytes import plan_bytes
from portability_graph import Checker, holds_kernel, names
from portability_targets import Kind, Target

from swapkv_jax.models import Geometry
from swapkv_jax.plan import Plan
from swapkv_jax.program import decode_specs
from swapkv_jax.sampling import Sampling
from swapkv_jax.staging import device_sharding

_KINDS: dict[str, Kind] = {"cpu": "cpu", "tpu": "tpu", "gpu": "gpu"}


class AttachedTarget(Target):
    """The default device, with the compiler that decode itself uses."""

    def missing(self) -> str | None:
        return None

    def sharding(self) -> jax.sharding.Sharding:
        return device_sharding()


def attached() -> AttachedTarget:
    """What `jax.devices()` gives first."""
    return AttachedTarget(name=jax.devices()[0].device_kind, kind=_KINDS[jax.default_backend()])


def check_graphs(plans: Mapping[str, Plan], geometry: Geometry) -> Iterator[Finding]:
    """The checks of tools/portability.py, by the compiler of the device itself: on a GPU every segment is exactly one
    command buffer, everywhere its kernels are the plan's and its bytes too."""
    checker = Checker(attached())
    for label, plan in plans.items():
        specs = decode_specs(plan, geometry, (Sampling(),))
        graphs = [
            checker.check(name, spec, kernel=holds_kernel(plan, spec))
            for name, spec in zip(names(specs), specs, strict=True)
        ]
        problems = [f"{graph.name}: {problem}" for graph in graphs for problem in graph.to_dict()["failures"]]
        made = [graph.compiled for graph in graphs if graph.compiled is not None and graph.has_bytes]
        if len(made) == len(graphs):
            temporaries = max(m.temporaries or 0 for m in made)
            problems += plan_bytes(plan, geometry, [m.taken for m in made], temporaries).problems
        else:
            problems += [f"{g.name} was not compiled" for g in graphs if not g.has_bytes and not g.failures]
        buffers = sum(m.command_buffers or 0 for m in made)
        yield Finding(
            part="graphs",
            what=f"{label} {plan.attention}",
            found="; ".join(problems)
            or f"{len(graphs)} graphs" + (f", {buffers} command buffers" if buffers else ""),
            passed=not problems,
            values={"graphs": len(graphs), "command_buffers": buffers},
        )


def count_launches(run: Callable[[], Any]) -> tuple[int, int]:
    """Launches of CUDA graphs, and of single kernels and copies beside them, that a profile of `run` shows."""
    with tempfile.TemporaryDirectory(prefix="accelerator-") as directory:
        with jax.profiler.trace(directory):
            run()
        files = sorted(Path(directory).rglob("*.xplane.pb"))
        return launches_among(_events(files))


def launches_among(events: Iterable[str]) -> tuple[int, int]:
    """By the names that CUDA's driver and runtime give their calls."""
    graphs = single = 0
    for name in events:
        graphs += name.startswith(("cuGraphLaunch", "cudaGraphLaunch"))
        single += name.startswith(("cuLaunch", "cudaLaunch", "cuMemcpy", "cudaMemcpy"))
    return graphs, single


def _events(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                yield from (event.name for event in line.events)
