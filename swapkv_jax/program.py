"""The compiled program of a plan: every graph it needs, lowered and compiled before the first token.

A graph takes buffers of the plan's shapes and nothing else, so that a shape outside the plan cannot run and
nothing can compile during decode. Buffers that change are donated and come back at the same address.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from swapkv_jax.attention import attend, attend_chunk
from swapkv_jax.attention_choice import check_capability
from swapkv_jax.graph import Graph, GraphMaker, GraphSpec, Shape, scalar
from swapkv_jax.group_graphs import GroupGraphs, compile_group_graphs
from swapkv_jax.in_graph import in_graph_segment
from swapkv_jax.models.blocks import BlockFunctions, Params, rms_norm, split_block
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.models.products import multiply
from swapkv_jax.plan import Plan
from swapkv_jax.sampling import Sampling, choose
from swapkv_jax.staging import compute_capability
from swapkv_jax.writes import append_tokens, fill_layer, fill_records


@dataclass
class Program:
    """A plan's graphs. B rows, C prompt tokens of a chunk, n layers of a segment, S the row capacity.

    `embed[C]` (table, tokens [C]) → x [C, H]
    `prefill[C]` (layer, x, K, V, row, start, length) → x, K, V: one chunk of one row through one layer
    `take[C]` (x [B, H], chunk [C, H], row, index) → x: a prompt's last hidden state becomes its row's
    `segments[n]` ([layer], x, [K], [V], [new], lengths) → x, [new]: n layers read their caches and give the
        new token's K and V, new [2, B, Hkv, D]; with transport `in_graph` K and V are one array each
    `append` ([K], [V], [new], lengths) → [K], [V]: all layers' new tokens join caches that stay on the device
    `head` (params, x, tokens, lengths, logits, advance, forced) → x, tokens, lengths, logits: moves lengths
        on, chooses the next token (or takes `forced` where it is not negative) and embeds it
    `assign` (old [B], new [B]) → new at the address of old: how the host sets lengths and the like
    `group` the graphs of policy `group`, which has no `segments`
    `fill` the copy of a layer, or of a staging slot's records, into a device slot; see writes.py
    """

    plan: Plan
    geometry: Geometry
    embed: dict[int, Graph]
    prefill: dict[int, Graph]
    take: dict[int, Graph]
    segments: dict[int, Graph]
    head: dict[Sampling, Graph]
    assign: Graph
    append: Graph | None
    fill: Graph | None
    group: GroupGraphs | None
    compile_s: float = 0.0
    _head_arguments: list[Any] = field(default_factory=list)
    _make: GraphMaker = Graph

    def prepare_head(self, sampling: Sampling) -> Graph:
        """The head that chooses tokens this way, compiled now if no generation has used it yet."""
        if sampling not in self.head:
            self.head[sampling] = self._make(
                "head", _head(self.geometry, sampling), self._head_arguments, _HEAD_DONATED
            )
        return self.head[sampling]

    def chunks(self, tokens: int, start: int = 0) -> list[tuple[int, int]]:
        """Splits a prompt's tokens from `start` on into (start, C), largest chunks first.

        A chunk is used where it would be more than three quarters full, the smallest wherever tokens are
        left: cost follows the padded length (measured: three calls of 64 cost 89 % of one of 256).
        """
        sizes = sorted(self.prefill, reverse=True)
        pieces = []
        for size in sizes:
            least = 0 if size == sizes[-1] else 3 * size // 4
            while tokens - start > least:
                pieces.append((start, size))
                start += size
        return pieces

    def embed_prompt(self, table: jax.Array, ids: Sequence[int], start: int = 0) -> list[jax.Array]:
        """The hidden states [C, H] of a prompt's chunks from `start` on before the first layer, the last one
        padded."""
        hidden = []
        for first, size in self.chunks(len(ids), start):
            tokens = np.zeros(size, np.int32)
            part = ids[first : first + size]
            tokens[: len(part)] = part
            hidden.append(self.embed[size](table, tokens))
        return hidden

    def prefill_layer(
        self,
        params: Params,
        hidden: list[jax.Array],
        k: jax.Array,
        v: jax.Array,
        row: int,
        length: int,
        start: int = 0,
    ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """One layer takes all chunks of a prompt of `length` tokens; K and V hold them in `row` afterwards. They
        must hold the tokens before `start` already, which are not among the chunks."""
        out = []
        for x, (first, size) in zip(hidden, self.chunks(length, start), strict=True):
            x, k, v = self.prefill[size](params, x, k, v, scalar(row), scalar(first), scalar(length))
            out.append(x)
        return out, k, v

    @property
    def decode_graphs(self) -> tuple[Graph, ...]:
        """Every graph that a decode step runs."""
        own = self.group.all if self.group is not None else ()
        graphs = (*self.segments.values(), *own, *self.head.values(), self.append, self.fill)
        return tuple(graph for graph in graphs if graph is not None)


_HEAD_DONATED = (1, 2, 3, 4)


def compile_program(plan: Plan, geometry: Geometry, sampling: Sampling) -> Program:
    """Lowers and compiles every graph of the plan for the default device.

    Raises:
      PlanError: the device has no such kernel as the plan's attention. UsageError: no device of this platform has.
    """
    check_capability(plan.attention, compute_capability())
    started = time.perf_counter()
    program = _make_program(plan, geometry, sampling, Graph)
    program.compile_s = time.perf_counter() - started
    return program


def decode_specs(plan: Plan, geometry: Geometry, samplings: Sequence[Sampling]) -> tuple[GraphSpec, ...]:
    """Every graph that decode steps of the plan run, with a head for each way to choose tokens, not compiled: to
    be compiled on behalf of a device that is not here."""
    program = _make_program(plan, geometry, samplings[0], GraphSpec)
    for sampling in samplings[1:]:
        program.prepare_head(sampling)
    return cast(tuple[GraphSpec, ...], program.decode_graphs)


def _make_program(plan: Plan, geometry: Geometry, sampling: Sampling, make: GraphMaker) -> Program:
    plan.validate(geometry)
    block = split_block(geometry, plan.dtype)
    dtype, b, h = jnp.dtype(plan.dtype), plan.batch, geometry.hidden
    table = Shape((geometry.vocab, h), dtype)
    number, rows = Shape((), jnp.int32), Shape((b,), jnp.int32)
    x = Shape((b, h), dtype)
    k, v = (Shape(s, dtype) for s in plan.layer_shapes(b))
    k_fill, v_fill = (Shape(s, dtype) for s in plan.layer_shapes(plan.slot_rows))
    new = Shape((2, b, plan.kv_heads, plan.head_dim), dtype)

    embed, prefill, take = {}, {}, {}
    for c in sorted({min(c, plan.capacity) for c in plan.prefill_chunks}):
        chunk = Shape((c, h), dtype)
        embed[c] = make("embed", _embed, [table, Shape((c,), jnp.int32)], ())
        arguments = [block.params, chunk, k_fill, v_fill, number, number, number]
        prefill[c] = make("prefill", _prefill(block), arguments, (1, 2, 3))
        take[c] = make("take", _take, [x, chunk, number, number], (0,))

    group = compile_group_graphs(plan, block, geometry, make) if plan.policy == "group" else None
    segments = {}
    if plan.transport == "in_graph":
        pools = [Shape((plan.layers, *side.shape), dtype) for side in (k, v)]
        arguments = [[block.params] * plan.layers, x, *pools, [new] * plan.layers, rows]
        function = in_graph_segment(plan, block)
        segments[plan.layers] = make("segment", function, arguments, (1, 4), host=(2, 3))
    for n in _segment_sizes(plan) if group is None and not segments else ():
        arguments = [[block.params] * n, x, [k] * n, [v] * n, [new] * n, rows]
        segments[n] = make("segment", _segment(block), arguments, (1, 4))

    append = fill = None
    if plan.policy == "resident":
        count = plan.layers
        append = make("append", append_tokens, [[k] * count, [v] * count, [new] * count, rows], (0, 1))
    elif plan.policy == "layer" and plan.tier == "disk":
        records = Shape((plan.staging_groups, plan.stride_bytes // plan.itemsize), dtype)
        fill = make("fill", fill_records(plan), [k, v, records, number, number], (0, 1))
    elif plan.policy == "layer" and plan.transport == "copy":
        fill = make("fill", fill_layer, [k, v, k, v], (0, 1))

    logits = Shape((b, geometry.vocab), jnp.float32)
    norm = Shape((h,), dtype)
    head_params = {"final_norm": norm, "embed": table, "head": table}
    if geometry.tied:
        del head_params["head"]
    program = Program(
        plan=plan,
        geometry=geometry,
        embed=embed,
        prefill=prefill,
        take=take,
        segments=segments,
        head={},
        assign=make("assign", _assign, [rows, rows], (0,)),
        append=append,
        fill=fill,
        group=group,
        _head_arguments=[head_params, x, rows, rows, logits, rows, rows],
        _make=make,
    )
    program.prepare_head(sampling)
    return program


def _segment_sizes(plan: Plan) -> set[int]:
    """Layers per segment that occur: the plan's, and what is left over at the end."""
    whole, rest = divmod(plan.layers, plan.layers_per_segment)
    return ({plan.layers_per_segment} if whole else set()) | ({rest} if rest else set())


# ---- the graphs ----------------------------------------------------------------------------------------


def _embed(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return table[tokens]


def _prefill(block: BlockFunctions) -> Callable[..., Any]:
    def prefill(params: Params, x, k, v, row, start, length):
        """x [C, H] at positions start.. of a prompt of `length`; K [rows, Hkv, D, S], V [rows, Hkv, S, D]."""
        chunk = x.shape[0]
        positions = start + jnp.arange(chunk, dtype=jnp.int32)
        # A prompt's keys are all rotated for the prompt's whole length, as if it came in one piece.
        q, k_new, v_new = block.project(params, x, positions, jnp.full((chunk,), length, jnp.int32))
        k_new, v_new = k_new.transpose(1, 2, 0), v_new.transpose(1, 0, 2)  # as the cache lies
        k = _write(k, k_new[None], 3, row, start, length)
        v = _write(v, v_new[None], 2, row, start, length)
        # The cache is read only after the write: the other order would make XLA copy it.
        return block.finish(params, x, attend_chunk(q, k_new, v_new, k, v, row, start)), k, v

    return prefill


def _write(cache: jax.Array, new: jax.Array, axis: int, row, start, length) -> jax.Array:
    """Writes a chunk (tokens along `axis`) at `start` of a row, in place, but for what lies past `length`.

    The chunk's tail may lie past the prompt, even past the capacity; there the cache keeps what it has.
    """
    chunk, size = new.shape[axis], cache.shape[axis]
    first = jnp.minimum(start, size - chunk)
    at = first + jnp.arange(chunk, dtype=jnp.int32)
    real = jnp.expand_dims((at >= start) & (at < length), [i for i in range(new.ndim) if i != axis])
    where = [row, *[jnp.zeros((), jnp.int32)] * 3]
    where[axis] = first
    old = jax.lax.dynamic_slice(cache, where, new.shape)
    new = jnp.where(real, jnp.roll(new, start - first, axis), old)
    return jax.lax.dynamic_update_slice(cache, new, where)


def _take(x: jax.Array, chunk: jax.Array, row: jax.Array, index: jax.Array) -> jax.Array:
    last = jax.lax.dynamic_index_in_dim(chunk, index, keepdims=True)  # [1, H]
    return jax.lax.dynamic_update_slice_in_dim(x, last, row, axis=0)


def _segment(block: BlockFunctions) -> Callable[..., Any]:
    def segment(layers: list[Params], x, ks, vs, news, lengths):
        """Reads the caches; the new K and V take the memory of `news`, which is given for that alone."""
        del news
        out = []
        for params, k, v in zip(layers, ks, vs, strict=True):
            q, k_new, v_new = block.project(params, x, lengths, lengths + 1)
            x = block.finish(params, x, attend(q, k, v, k_new, v_new, lengths))
            out.append(jnp.stack([k_new, v_new]))
        return x, out

    return segment


def _assign(old: jax.Array, new: jax.Array) -> jax.Array:
    del old
    return jax.lax.optimization_barrier(new)


def _head(geometry: Geometry, sampling: Sampling) -> Callable[..., Any]:
    def head(params, x, tokens, lengths, logits, advance, forced):
        del tokens, logits
        lengths = lengths + advance
        y = rms_norm(x, params["final_norm"], geometry.norm_eps)
        table = params["embed"] if geometry.tied else params["head"]
        logits = multiply(table, y, jnp.float32)
        tokens = jnp.where(forced >= 0, forced, choose(logits, lengths, sampling))
        return params["embed"][tokens], tokens, lengths, logits

    return head
