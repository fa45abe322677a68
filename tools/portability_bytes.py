"""The bytes of a plan's device buffers as a target's compiler lays them out, beside what the plan says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from swapkv_jax.graph import GraphSpec
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.plan import Plan

TOLERANCE = 0.02
_SMALL = 64 << 10  # an argument of less, such as a row's number, need not be a buffer of the plan


@dataclass(frozen=True)
class Argument:
    """One array that a graph takes. `weight`: of the model's; `host`: in pinned host memory; `bytes`: as laid out,
    padding included."""

    shape: tuple[int, ...]
    dtype: str
    weight: bool
    host: bool
    bytes: int


@dataclass(frozen=True)
class PlanBytes:
    """Device bytes that decode holds. `unplanned`: the largest that one graph takes beside the plan's buffers;
    `temporaries`: the most that one needs while it runs, beside arguments and planned slots."""

    planned: int
    compiled: int
    unplanned: int
    temporaries: int
    problems: tuple[str, ...]


def laid_out_bytes(shape: Sequence[int], itemsize: int, layout: Any) -> int:
    """Bytes of an array in a `jax.experimental.layout.Layout`: a TPU's arrays are tiled, and their last dimensions
    padded to whole tiles. Only the first level of tiles pads; the others divide it."""
    sizes = [shape[i] for i in layout.major_to_minor]
    tile = layout.tiling[0] if layout.tiling else ()
    sizes = [1] * (len(tile) - len(sizes)) + sizes
    for axis, size in enumerate(reversed(tile), start=1):
        sizes[-axis] = -(-sizes[-axis] // size) * size
    return math.prod(sizes) * itemsize


def arguments(spec: GraphSpec, compiled: jax.stages.Compiled) -> list[Argument]:
    """Every array that a compiled graph takes, in order."""
    leaves = jax.tree_util.tree_leaves_with_path(list(spec.arguments))
    formats = jax.tree.leaves(compiled.input_formats[0])
    return [
        Argument(
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype),
            # Parameters are dicts, and no plan's buffer is in one.
            weight=any(isinstance(key, jax.tree_util.DictKey) for key in path),
            host=path[0].idx in spec.host,  # pyright: ignore[reportAttributeAccessIssue]  (a sequence's key has it)
            bytes=laid_out_bytes(leaf.shape, leaf.dtype.itemsize, form.layout),
        )
        for (path, leaf), form in zip(leaves, formats, strict=True)
    ]


def plan_bytes(
    plan: Plan, geometry: Geometry, graphs: Sequence[Sequence[Argument]], temporaries: int
) -> PlanBytes:
    """Holds the plan's buffers against the arguments of all its decode graphs.

    Args:
      temporaries: the most bytes of any graph. Slots that only a graph itself holds are among them.
    """
    sizes = {(a.shape, a.dtype): a.bytes for graph in graphs for a in graph if not a.weight}
    planned = compiled = in_graph = spare = 0
    problems: list[str] = []
    known: set[tuple[tuple[int, ...], str]] = set()
    staged: dict[tuple[int, str], int] = {}  # by values of a record and dtype, most records
    padding: Counter[str] = Counter()
    for buffer in plan.buffers(geometry):
        if buffer.name.startswith("staging."):
            staged[buffer.shape[1], buffer.dtype] = buffer.shape[0]
        if buffer.tier != "device" or buffer.phase == "prefill":
            continue
        planned += buffer.bytes
        if buffer.phase == "graph":
            in_graph += buffer.bytes
            spare += buffer.bytes if buffer.name == "slot.spare" else 0
            continue
        known.add((buffer.shape, buffer.dtype))
        size = sizes.get((buffer.shape, buffer.dtype))
        if size is None:
            problems.append(f"no decode graph takes buffer {buffer.name} {list(buffer.shape)} {buffer.dtype}")
            continue
        compiled += size
        padding[f"{buffer.name.partition('.')[0]} {buffer.dtype}{list(buffer.shape)}"] += size - buffer.bytes
    compiled += min(in_graph, temporaries)
    unplanned = max(sum(_unplanned(graph, known, staged)) for graph in graphs)
    unused = max(0, min(spare, in_graph - temporaries))  # some versions and TPUs do without it
    if abs(compiled + unplanned + unused - planned) > TOLERANCE * planned:
        problems.append(
            f"device bytes: {compiled + unplanned:,} compiled, {unplanned:,} of them in no plan; {planned:,} planned"
            + (f"; most padded: {_most_padded(padding)}" if +padding else "")
        )
    lent = max(sum(a.bytes for a in graph if a.host) for graph in graphs)
    dram = plan.memory(geometry).dram
    if lent and abs(lent - dram) > TOLERANCE * dram:
        problems.append(f"host bytes: {lent:,} compiled, {dram:,} planned")
    return PlanBytes(planned, compiled, unplanned, max(0, temporaries - in_graph), tuple(problems))


def _most_padded(padding: Counter[str]) -> str:
    return ", ".join(f"{name} by {size:,}" for name, size in padding.most_common(2))


def _unplanned(
    graph: Sequence[Argument],
    known: set[tuple[tuple[int, ...], str]],
    staged: dict[tuple[int, str], int],
) -> Iterator[int]:
    """Bytes of what is no buffer of the plan, nor some of the records that a staging slot has room for."""
    for a in graph:
        records = len(a.shape) == 2 and a.shape[0] <= staged.get((a.shape[1], a.dtype), 0)
        if not (a.weight or a.host or records or (a.shape, a.dtype) in known or a.bytes < _SMALL):
            yield a.bytes
