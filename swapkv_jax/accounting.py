"""Memory in exact bytes: what the plan says, what XLA compiled, what is in use."""

from __future__ import annotations

from typing import Any

import jax
import msgspec
import numpy as np

from swapkv_jax.engine import Engine
from swapkv_jax.group_graphs import selection_of
from swapkv_jax.models import Geometry
from swapkv_jax.plan import Plan
from swapkv_jax.strategies.sizes import stores_keys


class DeviceBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the device during decode.

    `planned` sums the plan's device buffers: layer slots or the whole KV, each layer's new K and V, records that
    arrive for them, the hidden state, tokens, lengths, logits. `compiled` is the same sum out of XLA's
    `memory_analysis`: the arguments of every decode graph, each buffer counted once although several graphs take
    it. `aliased` of these bytes are the DRAM pool's own memory. Beside them stand `weights` (of which a CPU holds
    one copy, the host's), XLA's `temporaries` (the largest of any graph: graphs run one after the other) and
    `prefill`, which prefill alone needs.
    """

    planned: int
    compiled: int
    aliased: int
    weights: int
    temporaries: int
    prefill: int


def device_bytes(engine: Engine) -> DeviceBytes:
    """What the engine's plan says of the device beside what XLA compiled."""
    plan, program, geometry = engine.plan, engine.program, engine.model.geometry
    planned = plan.memory(geometry)
    buffers = {buffer.name: buffer.bytes for buffer in plan.buffers(geometry)}
    layer_weights = _tree_bytes(engine.params["layers"][0])
    head_weights = _tree_bytes({k: v for k, v in engine.params.items() if k != "layers"})

    head = next(iter(program.head.values())).memory
    compiled = head.arguments - head_weights  # x, tokens, lengths, logits, advance, forced
    shared = buffers["x"] + buffers["lengths"]
    whole, rest = divmod(plan.layers, plan.layers_per_segment)
    if plan.policy == "resident":
        for size, count in ((plan.layers_per_segment, whole), (rest, 1)):
            if size and count:
                arguments = program.segments[size].memory.arguments
                compiled += count * (arguments - size * layer_weights - shared)
    elif program.group is not None:
        # A segment waits for a selection, the next layer's or `no_ids`; what is its own is in the predict graph,
        # and in the segment as well where that selects for the next step.
        ids = buffers["no_ids"]
        segment = program.group.segment.memory.arguments - layer_weights - shared - ids
        predict = program.group.predict.memory.arguments - layer_weights - shared
        choice = selection_of(plan)

        def of_layer(kind: str) -> int:
            """Bytes of a kind of buffer in a layer that selects."""
            ends = f".{plan.selecting_layers[0]}"
            return sum(
                n for name, n in buffers.items() if name.startswith(f"{kind}.") and name.endswith(ends)
            )

        summary = of_layer("summary")
        predict -= of_layer("adapter") + summary
        compiled += ids + len(plan.selecting_layers) * (
            segment + predict - (ids if choice.segments_select else 0)
        )
        if program.group.whole is not None:
            own = program.group.whole.memory.arguments - layer_weights - shared - ids
            compiled += len(choice.whole) * own
        if plan.transport == "copy":
            most, load = max(program.group.load.items())
            keyed = stores_keys(choice)
            places = (2 if keyed else 3) * most * np.dtype(np.int32).itemsize
            known = of_layer("pool") + places + (0 if keyed else summary)
            compiled += (plan.staging_slots or 0) * (load.memory.arguments - known)
    elif plan.transport == "in_graph":
        segment = program.segments[plan.layers].memory.arguments
        compiled += segment - plan.layers * layer_weights - shared
    else:
        new = buffers["new.0"]
        slot = program.segments[1].memory.arguments - layer_weights - shared - new
        compiled += plan.layers * new + (plan.physical_layers or 0) * slot
        if plan.tier == "disk" and plan.transport == "copy" and program.fill is not None:
            place = 2 * np.dtype(np.int32).itemsize  # a row and its first group
            compiled += (plan.staging_slots or 0) * (program.fill.memory.arguments - slot - place)
    return DeviceBytes(
        planned=planned.device + planned.aliased,
        compiled=compiled,
        aliased=planned.aliased,
        weights=_tree_bytes(engine.params),
        temporaries=max(graph.memory.temporaries for graph in program.decode_graphs),
        prefill=planned.prefill,
    )


# Of a plan's buffers: state that every policy has alike, and small change of `group` that holds no keys or values.
_NOT_KV = {
    "x",
    "tokens",
    "lengths",
    "advance",
    "forced",
    "logits",
    "new",
    "used",
    "ids",
    "no_ids",
    "adapter",
    "queries",
}


def kv_bytes(plan: Plan, geometry: Geometry) -> dict[str, int]:
    """Bytes per tier ("device", "dram", "disk") that decode holds keys, values or summaries of them in.

    What a device buffer shares with DRAM counts there. `group`'s adapter is a weight: it does not grow with rows
    or context.
    """
    held = {"device": 0, "dram": 0, "disk": 0}
    for buffer in plan.buffers(geometry):
        kind = buffer.name.partition(".")[0]
        if kind not in _NOT_KV and buffer.phase != "prefill" and buffer.alias_of is None:
            held[buffer.tier] += buffer.bytes
    return held


def _tree_bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
