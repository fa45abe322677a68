"""How long a step takes at least: the bytes that a plan moves over what moves them.

A floor, not a forecast: launches, the host's own work and arithmetic come on top of it. They come on top of every
policy's step, so what one policy costs over another is told better than how long either takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swapkv_jax.devices import Device
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.plan import Plan
from swapkv_jax.planner.budgets import weights_read

# Share of the selected groups that no slot holds: 15 % and 14 % at batch 1 and 8 (tools/performance.md).
MISSES = 0.15
# Reads that the store keeps in flight under `layer`: more arrive out of order.
LONG_READS = 3


class DiskModel(Protocol):
    """How long a disk takes for random reads."""

    def batch_seconds(self, reads: float, nbytes: float) -> float:
        """Seconds for `reads` reads of `nbytes` each, all in flight together."""
        ...


@dataclass(frozen=True, kw_only=True)
class DescribedDisk:
    """A disk by two numbers: bytes/s, and seconds per read beside its bytes."""

    bandwidth: float
    read_s: float = 0.0

    def batch_seconds(self, reads: float, nbytes: float) -> float:
        """Seconds for `reads` reads of `nbytes` each, all in flight together."""
        return reads * (self.read_s + nbytes / self.bandwidth)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What moves a plan's bytes; None is unknown.

    Attributes:
      link: bytes/s from host memory to the device, where they are not one memory.
      memory: bytes/s that the device reads from its own memory.
      disk: of the store.
      source: who says so, in words for a person.
    """

    link: float | None = None
    memory: float | None = None
    disk: DiskModel | None = None
    source: str = "unknown"

    @classmethod
    def of(cls, device: Device) -> Rates:
        """The rates of a device's description. Where memory is shared, a copy reads it and writes it."""
        memory = float(device.memory_bandwidth.value)
        return cls(
            link=memory / 2 if device.link is None else float(device.link.value),
            memory=memory,
            disk=DescribedDisk(bandwidth=device.disk.bandwidth, read_s=device.disk.read_s),
            source=f"the description of {device.name}",
        )


UNKNOWN = Rates()


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of one step. `transfer_s` passes while the device computes for `compute_s`."""

    compute_s: float
    transfer_s: float

    @property
    def step_s(self) -> float:
        return max(self.compute_s, self.transfer_s)


def step_cost(plan: Plan, geometry: Geometry, rates: Rates) -> StepCost | None:
    """The least time of a step at full context; None where a rate that it depends on is unknown."""
    transfer = _transfer_seconds(plan, rates)
    if rates.memory is None or transfer is None:
        return None
    # What group keeps on the device (slots, summaries, queries) is read about once.
    grouped = plan.policy == "group"
    state = plan.memory(geometry).device if grouped else _kv_bytes(plan, plan.capacity)
    return StepCost(
        compute_s=(weights_read(geometry, plan.dtype) + state) / rates.memory, transfer_s=transfer
    )


def resident_seconds(plan: Plan, geometry: Geometry, rates: Rates) -> float | None:
    """The least time of a step with the same rows, context and dtype, were all KV on the device."""
    if rates.memory is None:
        return None
    return (weights_read(geometry, plan.dtype) + plan.full_kv_bytes) / rates.memory


def overhead(plan: Plan, geometry: Geometry, rates: Rates) -> float | None:
    """How much longer a step takes than `resident`'s would: 0.3 is 30 %; below 0 is faster. None: unknown."""
    cost, reference = step_cost(plan, geometry, rates), resident_seconds(plan, geometry, rates)
    return None if cost is None or reference is None else cost.step_s / reference - 1


def _kv_bytes(plan: Plan, tokens: int) -> int:
    return 2 * plan.layers * plan.batch * tokens * plan.kv_heads * plan.head_dim * plan.itemsize


def _transfer_seconds(plan: Plan, rates: Rates) -> float | None:
    """Seconds that KV travels in one step, pieces overlapping; None where a rate is unknown."""
    if plan.policy == "resident":
        return 0.0
    if plan.policy == "group":
        assert plan.selection is not None
        missed = MISSES * plan.selection.selected_groups  # per selection and row
        selections = plan.selection.selections_per_step(plan.layers)
        from_disk = missed * (plan.batch - (plan.dram_rows or 0))
        size, link_bytes = plan.stride_bytes, missed * plan.batch * selections * plan.stride_bytes
        reads, depth = from_disk * selections, from_disk
    else:
        link_bytes = _kv_bytes(plan, plan.capacity)
        size = (plan.staging_groups or 0) * plan.stride_bytes
        reads = plan.layers * plan.batch * plan.groups / plan.staging_groups if plan.staging_groups else 0
        depth = LONG_READS
    seconds = [0.0]
    if plan.transport != "alias":
        if rates.link is None:
            return None
        seconds.append(link_bytes / rates.link)
    if reads:
        if rates.disk is None:
            return None
        seconds.append(reads / depth * rates.disk.batch_seconds(depth, size))
    return max(seconds)
