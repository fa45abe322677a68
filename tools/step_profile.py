"""Where the time of our engine's steps goes, by JAX's own profile of a few of them."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

Interval = tuple[float, float]  # begin and end, in nanoseconds of the profile's clock

_STEP = "swapkv_jax: one step"
# Graphs by what they do, in the order in which a moment at which several run is counted. All others compute.
KINDS = {"compute": r"", "predict": r"predict", "transfer": r"load|fill"}


@dataclass(frozen=True)
class StepProfile:
    """`steps` steps that took `seconds` in all, of which graphs of each kind ran for `busy` seconds: those that
    compute the layers and the head, those that select groups, and those that move what arrived into its slots. A kind
    without a graph of its own is None: what it does, if anything, is in the others' time."""

    steps: int
    seconds: float
    busy: dict[str, float | None]

    def split(self, waited: float) -> dict[str, Any]:
        """Seconds per step that add up to `step_s`: `compute`, `predict`, `transfer`, `wait` and `host`.

        No moment is counted twice. `wait` is what of `waited` seconds (for reads, as the engine counts) no graph ran
        in; `host` the rest of the time without a graph: bookkeeping, launches, and records that threads put in slots.
        """
        idle = max(0.0, self.seconds - sum(filter(None, self.busy.values())))
        wait = min(waited, idle)
        parts = {**self.busy, "wait": wait, "host": idle - wait}
        per_step = {name: None if part is None else part / self.steps for name, part in parts.items()}
        return {"steps": self.steps, "step_s": self.seconds / self.steps, **per_step}


def profile_steps(step: Callable[[], object], steps: int) -> StepProfile:
    """Runs `step` so often, with JAX's profiler on, which makes it somewhat slower. One profile at a time in a
    process."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow what is measured
    with tempfile.TemporaryDirectory(prefix="swapkv-profile-") as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            for _ in range(steps):
                with jax.profiler.TraceAnnotation(_STEP):
                    step()
        (file,) = Path(directory).rglob("*.xplane.pb")
        with warnings.catch_warnings():
            # Where warnings are errors, jax 0.12 would abort over how its own event types were made.
            warnings.simplefilter("ignore", DeprecationWarning)
            windows, runs = _read(jax.profiler.ProfileData.from_file(str(file)))
    busy: dict[str, float | None] = {}
    taken: list[Interval] = []
    for kind in KINDS:
        before = _length(taken)
        taken = _union([*taken, *_within(runs[kind], windows)])
        busy[kind] = (_length(taken) - before) / 1e9 if runs[kind] else None
    return StepProfile(steps, _length(windows) / 1e9, busy)


def _read(profile: Any) -> tuple[list[Interval], dict[str, list[Interval]]]:
    """The steps, and by kind when each launched graph ran: from its first operation on a device to its last."""
    windows: list[Interval] = []
    launches: dict[tuple[str, str], Interval] = {}
    for event in (event for plane in profile.planes for line in plane.lines for event in line.events):
        begin, end = event.start_ns, event.start_ns + event.duration_ns
        if event.name == _STEP:
            windows.append((begin, end))
            continue
        stats = dict(event.stats)
        if "hlo_module" in stats:
            key = (str(stats["hlo_module"]), str(stats.get("run_id", event.start_ns)))
            first, last = launches.get(key, (begin, end))
            launches[key] = (min(first, begin), max(last, end))
    runs: dict[str, list[Interval]] = {kind: [] for kind in KINDS}
    for (module, _), interval in launches.items():
        runs[_kind(module)].append(interval)
    return sorted(windows), runs


def _kind(module: str) -> str:
    name = module.removeprefix("jit_").strip("_")
    return next((kind for kind, pattern in KINDS.items() if pattern and re.match(pattern, name)), "compute")


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _within(intervals: Iterable[Interval], windows: Iterable[Interval]) -> Iterator[Interval]:
    """The parts of the intervals that lie in a window."""
    bounds = list(windows)
    for begin, end in intervals:
        for first, last in bounds:
            if begin < last and end > first:
                yield max(begin, first), min(end, last)


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
