"""What the scan of policy `group`'s summary costs by itself, which alone grows with the context."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np

from swapkv_jax import Engine
from swapkv_jax.group_graphs import selection_of
from swapkv_jax.staging import put

_MORE_THAN_CACHES = 256 << 20
_PASSES = 5


def scan_seconds(engine: Engine) -> float:
    """Seconds that the layers' predict graphs take per step, on average where not every step selects: a layer's
    query, its scores over the whole summary and their top M. (A layer's query costs the same at every context.)

    Each call gets a summary of its own, or one that the processor's caches have lost since it was last read.
    Median of a few passes.
    """
    graphs, plan, geometry = engine.program.group, engine.plan, engine.model.geometry
    assert graphs is not None, "policy group alone has a summary"
    shapes = {buffer.name: buffer for buffer in plan.buffers(geometry)}
    choice = selection_of(plan)
    selecting, one = plan.selecting_layers, plan.selecting_layers[0]
    rng = np.random.default_rng(0)

    def random(name: str) -> jax.Array:
        buffer = shapes[name]
        values = rng.standard_normal(buffer.shape, np.float32)
        if buffer.dtype == "uint16":  # the bits of a summary in 16
            return put(values.astype(choice.summary_dtype).view(np.uint16))
        return put(values.astype(buffer.dtype))

    x, queries = random("x"), random(f"queries.{one}")
    adapter = random(f"adapter.{one}") if f"adapter.{one}" in shapes else ()
    parts = {n: b for n, b in shapes.items() if n.startswith("summary.") and n.endswith(f".{one}")}
    copies = min(plan.layers, -(-_MORE_THAN_CACHES // sum(part.bytes for part in parts.values())))

    def summary() -> Any:
        named = {name.split(".")[1]: random(name) for name in parts}
        return named if len(named) > 1 else next(iter(named.values()))

    summaries = [summary() for _ in range(copies)]
    lengths = put(np.full(plan.batch, plan.max_context - 1, np.int32))
    layers = [engine.params["layers"][layer] for layer in selecting]
    ids = put(np.zeros(shapes[f"ids.{one}"].shape, np.int32))

    def one_pass() -> float:
        nonlocal ids
        started = time.perf_counter()
        for layer, params in enumerate(layers):
            ids = graphs.predict(params, queries, adapter, x, summaries[layer % copies], lengths, ids)
            jax.block_until_ready(ids)
        return time.perf_counter() - started

    one_pass()
    part = choice.selections_per_step(plan.layers) / len(selecting)
    return part * float(np.median([one_pass() for _ in range(_PASSES)]))
