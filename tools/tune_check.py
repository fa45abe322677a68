"""Holds the tuner's predictions against engines, at batches, contexts and choices that it was not tuned with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from swapkv_jax.disk_curve import DiskCurve, throttled_curve
from swapkv_jax.tiers.throttled import StorageProfile, ThrottledDisk
from swapkv_jax.tuner.choice import Choice
from swapkv_jax.tuner.search import Found
from swapkv_jax.tuner.step_time import step_time
from swapkv_jax.tuner.tune import Tuner


@dataclass(frozen=True, kw_only=True)
class Point:
    """One engine: seconds of a step, predicted and measured; misses per layer, of all rows."""

    group_tokens: int
    batch: int
    context: int
    predicted_s: float
    measured_s: float
    predicted_misses: float
    measured_misses: float

    @property
    def off(self) -> float:
        """How far the prediction is off, as a fraction of what was measured."""
        return self.predicted_s / self.measured_s - 1


def check_points(tuner: Tuner, found: Found, here: DiskCurve, profile: StorageProfile | None) -> list[Point]:
    """The chosen plan, and the fastest of another group size, at three batches and two contexts each."""
    disk = here if profile is None else throttled_curve(here, profile)
    others = {c: s for c, (_, s) in found.measured.items() if c.group_tokens != found.choice.group_tokens}
    choices = [found.choice, *([min(others, key=lambda c: others[c])] if others else [])]
    full = len(tuner.text.prompts[0])
    batches = sorted({1, max(1, tuner.goal.batch // 2), tuner.goal.batch})
    return [
        _point(tuner, choice, batch, context, disk, profile)
        for choice in choices
        for context in (full, full // 2)
        for batch in batches
    ]


def _point(
    tuner: Tuner,
    choice: Choice,
    batch: int,
    context: int,
    disk: DiskCurve,
    profile: StorageProfile | None,
) -> Point:
    text = tuner.text if context == len(tuner.text.prompts[0]) else tuner.text.shorter(context)
    syscalls = None if profile is None else ThrottledDisk(profile)
    plan, steps = tuner.run_engine(choice, batch, text=text, syscalls=syscalls)
    known = tuner.replayed(choice)
    predicted = step_time(plan, known.misses, known.rows, tuner.graphs, disk, tuner.host_work)
    layers = len(known.misses[0])
    return Point(
        group_tokens=choice.group_tokens,
        batch=batch,
        context=context,
        predicted_s=predicted.total,
        measured_s=steps.seconds,
        predicted_misses=sum(map(sum, known.misses)) / len(known.misses) / layers * batch / known.rows,
        measured_misses=steps.misses,
    )


def check(tuner: Tuner, found: Found, here: DiskCurve, profile: StorageProfile | None) -> str:
    """A table of `check_points`, and the worst."""
    points = check_points(tuner, found, here, profile)
    lines = ["  G batch context predicted  measured    off  misses per layer"]
    lines += [
        f"{p.group_tokens:>3} {p.batch:>5} {p.context:>7} "
        f"{p.predicted_s * 1e3:>6.1f} ms {p.measured_s * 1e3:>6.1f} ms {p.off:>6.0%}  "
        f"{p.predicted_misses:.1f} predicted, {p.measured_misses:.1f} measured"
        for p in points
    ]
    worst = max(abs(p.off) for p in points)
    within = sum(abs(p.off) <= 0.25 for p in points)
    lines.append(f"{within} of {len(points)} within 25 %, the worst off by {worst:.0%}")
    lines.append(json.dumps([asdict(p) for p in points]))
    return "\n".join(lines)
