"""What a step takes per layer, row and missed group beyond its graphs, by the difference of real steps to them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from swapkv_jax.adapter import Adapter
from swapkv_jax.engine import Engine
from swapkv_jax.models import Model
from swapkv_jax.plan import Plan
from swapkv_jax.planner.costs import DiskModel
from swapkv_jax.prefilled import Prefilled
from swapkv_jax.tiers import Syscalls
from swapkv_jax.tuner.step_time import HostWork, step_time
from swapkv_jax.tuner.timing import QUIET, GraphModel

WARM_UP = 4  # steps in which slots fill up


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Decode steps of an engine: `seconds` of one, and `misses` per layer in it, all rows together."""

    seconds: float
    misses: float


def run_steps(
    model: Model,
    plan: Plan,
    adapter: Adapter,
    prefilled: Prefilled,
    prompts: Sequence[Sequence[int]],
    following: Sequence[Sequence[int]],
    store_dir: Path,
    syscalls: Syscalls | None = None,
) -> Steps:
    """Decodes `following` under a plan of policy `group`. A step's time is a low percentile of those after the first
    few: whatever else runs can only make one slower.

    What the engine stores in `store_dir` is gone afterwards.
    """
    with (
        tempfile.TemporaryDirectory(prefix="tune-", dir=store_dir) as store,
        Engine(model, plan, store_dir=Path(store), adapter=adapter, syscalls=syscalls) as engine,
    ):
        count = len(following[0])
        generation = engine.generate(
            prompts, max_new_tokens=count, ignore_eos=True, forced=following, prefilled=prefilled
        )
        for _ in range(WARM_UP + 1):
            next(generation)
        before = engine.use.groups_read
        for _ in generation:
            pass
        read = engine.use.groups_read - before
        return Steps(
            seconds=float(np.percentile(generation.step_s[WARM_UP:], QUIET)),
            misses=read / (count - 1 - WARM_UP) / plan.layers,
        )


def fit_host_work(timed: Sequence[tuple[Plan, Steps]], graphs: GraphModel, disk: DiskModel) -> HostWork:
    """The host work, none of it negative, that explains best what steps take beyond graphs and exposed reads."""
    rows, rest = [], []
    for plan, steps in timed:
        misses = [[steps.misses] * plan.layers]
        known = step_time(plan, misses, plan.batch, graphs, disk, HostWork())
        rows.append([plan.layers, plan.layers * plan.batch, plan.layers * steps.misses])
        rest.append(steps.seconds - known.total)
    features, beyond = np.array(rows), np.array(rest)
    scale = np.array([steps.seconds for _, steps in timed])
    (layer, row, miss), _ = nnls(features / scale[:, None], np.maximum(beyond, 0) / scale)
    return HostWork(layer=float(layer), row=float(row), miss=float(miss))
