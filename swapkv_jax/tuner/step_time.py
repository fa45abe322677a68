"""From the parts of a step to its time: graphs, reads that they hide or do not, the host's own work."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from swapkv_jax.group_graphs import selection_of
from swapkv_jax.plan import Plan
from swapkv_jax.planner.costs import DiskModel
from swapkv_jax.tuner.timing import GraphModel, Shape


class HostWork(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that nothing hides, beyond the graphs timed alone: per layer, per row of a layer (graphs take longer
    where the host and its I/O threads run on the same cores), and per missed group."""

    layer: float = 0.0
    row: float = 0.0
    miss: float = 0.0


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: `compute` of its graphs, `read` of its reads, of which `exposed` are hidden behind nothing,
    `host` work; `total` of them all but the hidden."""

    compute: float
    read: float
    exposed: float
    host: float

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.host


def step_time(
    plan: Plan,
    misses: Sequence[Sequence[float]],
    rows: int,
    graphs: GraphModel,
    disk: DiskModel,
    host: HostWork,
) -> StepTime:
    """What a step of policy `group` takes, averaged over steps.

    Args:
      misses: [steps][layers], groups that no slot held, of `rows` rows together; the plan's rows miss as many each.
    """
    choice = selection_of(plan)
    shape = Shape(
        batch=plan.batch,
        tokens=choice.reuse_slots * plan.group_tokens,
        places=plan.summary_places,
        rank=choice.rank,
    )
    missed = np.asarray(misses, np.float64) * plan.batch / rows  # [T, L]
    kept_in_dram = (plan.dram_rows or 0) / plan.batch
    # A layer selects every `refresh` steps: what its scoring takes is spread over them.
    scoring = graphs.seconds("predict", shape) / np.mean(choice.refresh or (1,))
    layer = graphs.seconds("segment", shape) + scoring
    loads = np.vectorize(lambda n: _load_seconds(n, plan, graphs), [float])(missed)
    reads = np.vectorize(lambda n: disk.batch_seconds(n * (1 - kept_in_dram), plan.stride_bytes), [float])(
        missed
    )
    if choice.lookahead == "layer":  # what is read for a layer is hidden by the layer before
        exposed = np.maximum(reads - layer, 0).sum(axis=1)
    else:  # by all others
        exposed = np.maximum(reads.sum(axis=1) - plan.layers * layer, 0)
    compute = plan.layers * layer + loads.sum(axis=1) + graphs.seconds("head", Shape(batch=plan.batch))
    work = plan.layers * (host.layer + plan.batch * host.row) + host.miss * missed.sum(axis=1)
    return StepTime(
        compute=float(compute.mean()),
        read=float(reads.sum(axis=1).mean()),
        exposed=float(exposed.mean()),
        host=float(work.mean()),
    )


def _load_seconds(misses: float, plan: Plan, graphs: GraphModel) -> float:
    """Of the loads that carry so many records: each as large as the next bucket."""
    if misses <= 0:
        return 0.0
    sizes = selection_of(plan).load_buckets
    whole, rest = divmod(misses, sizes[-1])
    records = [sizes[-1]] * int(whole) + ([next(n for n in sizes if n >= rest)] if rest > 0 else [])
    return sum(
        graphs.seconds("load", Shape(batch=plan.batch, records=n, record_bytes=plan.stride_bytes))
        for n in records
    )
