"""The graphs of the `group` policy: attention over selected groups, and the selection itself.

Shapes: B rows, Hkv KV heads, D head dim, G tokens per group, P places (tokens or groups) of the summary per row, w
numbers per place, S row capacity, M selected groups, n records of a load. `strategies` says what a summary holds, and
what an adapter is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from swapkv_jax.attention_choice import query_columns
from swapkv_jax.graph import Graph, GraphMaker, Shape
from swapkv_jax.models.blocks import BlockFunctions, Params
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.plan import Plan
from swapkv_jax.predictor import select
from swapkv_jax.selection import Selection
from swapkv_jax.slot_layouts import SlotLayout, seen_as, slot_layout
from swapkv_jax.strategies.named import shadowkv_of, strategy_of
from swapkv_jax.strategies.sizes import Part, has_adapter, map_parts, stores_keys


@dataclass(frozen=True)
class GroupGraphs:
    """One layer's graphs; every layer runs through the same ones.

    `load[n]`: see `load_groups`. `summarise`: see `group_summarise`. `predict`, `segment`: see
    `group_predict` and `group_segment`. `between`: the segment of steps after which nothing is selected anew, where
    `segment` would select. `whole`, `whole_load[n]`: the segment and loads of layers that keep every group, see
    `whole_segment`.
    """

    load: dict[int, Graph]
    summarise: Graph
    predict: Graph
    segment: Graph
    between: Graph | None
    whole: Graph | None
    whole_load: dict[int, Graph]

    @property
    def all(self) -> tuple[Graph, ...]:
        others = tuple(graph for graph in (self.between, self.whole) if graph is not None)
        return (self.segment, *others, self.predict, *self.load.values(), *self.whole_load.values())


def compile_group_graphs(
    plan: Plan, block: BlockFunctions, geometry: Geometry, make: GraphMaker = Graph
) -> GroupGraphs:
    """The policy's graphs, lowered and compiled for the default device, or as `make` makes them."""
    dtype, kv_dtype, b = jnp.dtype(plan.dtype), jnp.dtype(plan.cache_dtype), plan.batch
    choice = selection_of(plan)
    values = plan.stride_bytes // plan.itemsize
    rolling = _shapes(plan.rolling_parts)
    keyed = stores_keys(choice)
    view = _SummaryView(plan)
    adapter = Shape((plan.kv_heads * plan.head_dim, choice.rank), jnp.float32) if has_adapter(choice) else ()
    ids = Shape((b, choice.selected_groups), jnp.int32)
    x, lengths, scalar = Shape((b, geometry.hidden), dtype), Shape((b,), jnp.int32), Shape((), jnp.int32)
    columns = query_columns(plan.attention, geometry.heads * geometry.head_dim)
    queries = Shape((geometry.hidden, columns), jnp.dtype(choice.summary_dtype))
    k_row = Shape(plan.layer_shapes(plan.slot_rows)[0], dtype)
    rarely = choice.lookahead == "layer-then-step" or max(choice.refresh, default=1) > 1

    def slots(layers: Sequence[int]) -> tuple[Any, Shape]:
        """The pool of each of these layers, which are alike, and which of its slots are in use."""
        count = plan.pool_slots(layers[0])
        return _shapes(plan.pool_parts(count)), Shape((b, count), jnp.bool_)

    pool, used = slots(plan.selecting_layers)

    def make_segment(*, selects: bool) -> Graph:
        state = [rolling, view.held, *([ids] if selects else [])]
        return make(
            "segment" if selects == choice.segments_select else "between",
            group_segment(plan, block, selects=selects),
            [block.params, adapter, x, pool, used, lengths, ids, *state],
            (2, *range(7, 7 + len(state))),
        )

    def make_loads(pool: Any, sizes: Iterable[int]) -> dict[int, Graph]:
        load = {}
        for n in sizes:
            places = Shape((n,), jnp.int32)
            load[n] = make(
                "load",
                load_groups(plan, block),
                [pool, Shape((n, values), kv_dtype), places, places, *([] if keyed else [places, view.held])],
                (0,),
            )
        return load

    whole, whole_load = None, {}
    if choice.whole:
        whole_pool, whole_used = slots(choice.whole)
        whole_load = make_loads(whole_pool, _whole_sizes(choice, b))
        whole = make(
            "whole",
            whole_segment(plan, block),
            [block.params, x, whole_pool, whole_used, lengths, ids, rolling],
            (1, 6),
        )
    return GroupGraphs(
        load=make_loads(pool, choice.load_buckets),
        summarise=make(
            "summarise",
            group_summarise(plan, block),
            [view.held, adapter, k_row, scalar, *([] if keyed else [scalar])],
            (0,),
        ),
        predict=make(
            "predict",
            group_predict(plan, block),
            [block.params, queries, adapter, x, view.held, lengths, ids],
            (6,),
        ),
        segment=make_segment(selects=choice.segments_select),
        between=make_segment(selects=False) if choice.segments_select and rarely else None,
        whole=whole,
        whole_load=whole_load,
    )


def _whole_sizes(choice: Selection, batch: int) -> set[int]:
    """Records that loads of a layer that keeps every group carry: a prompt's, and what all rows complete at once."""
    most = choice.load_buckets[-1]
    return {next((n for n in choice.load_buckets if n >= batch), most), most}


def _shapes(parts: dict[str, Part]) -> tuple[Shape, ...]:
    return tuple(Shape(part.shape, jnp.dtype(part.dtype)) for part in parts.values())


def group_summarise(plan: Plan, block: BlockFunctions) -> Callable[..., Any]:
    """The summary with a prefilled row's keys in it: (summary, adapter, k, row) → summary. See `Strategy.fill`."""
    strategy, view = strategy_of(plan, block), _SummaryView(plan)

    def summarise_row(summary, adapter, k, row, *length):
        return view.hold(strategy.fill(view.see(summary), adapter, k, row, *length))

    return summarise_row


class _SummaryView:
    """One layer's summary as it is held on the device between graphs and as strategies see it, see
    `Plan.held_dtype`. `held` has the shapes that graphs take and give."""

    def __init__(self, plan: Plan):
        def shapes(dtype_of: Callable[[str], str]) -> Any:
            return map_parts(lambda part: Shape(part.shape, jnp.dtype(dtype_of(part.dtype))), plan)

        self._seen, self.held = shapes(str), shapes(plan.held_dtype)

    def see(self, summary: Any) -> Any:
        return jax.tree.map(lambda part, like: seen_as(part, like.dtype), summary, self._seen)

    def hold(self, summary: Any) -> Any:
        return jax.tree.map(lambda part, like: seen_as(part, like.dtype), summary, self.held)


def load_groups(plan: Plan, block: BlockFunctions) -> Callable[..., Any]:
    """Records into slots: (pool, records, rows, slots) → pool, fence. See `SlotLayout.load`. Where records have no
    keys the graph also takes their groups and the summary, which makes them."""
    layout = slot_layout(plan)
    if stores_keys(selection_of(plan)):
        return layout.load
    strategy, view = shadowkv_of(plan, block), _SummaryView(plan)

    def load(pool, records, rows, slots, groups, summary):
        return layout.load(
            pool, strategy.whole_records(records, rows, groups, view.see(summary)), rows, slots
        )

    return load


def group_segment(
    plan: Plan, block: BlockFunctions, *, selects: bool, interpret: Any = False
) -> Callable[..., Any]:
    """One layer's step: (params, adapter, x, pool, used, lengths, after, rolling, summary) → x, rolling, summary.

    `after` [B, M] is there to be waited for: the selection for the next layer, whose reads should run beside this
    graph, must not share the processor with it.

    Args:
      selects: also takes and gives `ids` [B, M], the groups that the next step should attend (lookahead by a step).
      interpret: interprets the plan's attention kernel, for tests off its platform.
    """
    layout, strategy, view = slot_layout(plan, interpret), strategy_of(plan, block), _SummaryView(plan)

    def segment(params: Params, adapter, x, pool, used, lengths, after, rolling, summary, *ids):
        del after, ids  # given for their order and memory alone
        x, rolling, q, k_new = _attend(block, layout, params, x, pool, used, lengths, rolling)
        # The write comes before the read, so that XLA can do it in place.
        keys = None if plan.place_tokens == 1 else layout.keys(rolling).astype(k_new.dtype)
        summary = strategy.advance(view.see(summary), adapter, k_new, keys, lengths)
        if not selects:
            return x, rolling, view.hold(summary)
        ids = _select(plan, block, q, adapter, summary, lengths + 1)
        return x, rolling, view.hold(summary), ids

    return segment


def whole_segment(plan: Plan, block: BlockFunctions, *, interpret: Any = False) -> Callable[..., Any]:
    """A step of a layer that keeps every group: (params, x, pool, used, lengths, after, rolling) → x, rolling. See
    `group_segment`."""
    layout = slot_layout(plan, interpret, whole=True)

    def segment(params: Params, x, pool, used, lengths, after, rolling):
        del after
        x, rolling, _, _ = _attend(block, layout, params, x, pool, used, lengths, rolling)
        return x, rolling

    return segment


def _attend(
    block: BlockFunctions, layout: SlotLayout, params: Params, x, pool, used, lengths, rolling
) -> Any:
    """A layer's step over its slots and its rolling buffer, which gets the new token: x, rolling, the queries and the
    new token's key."""
    q, k_new, v_new = block.project(params, x, lengths, lengths + 1)
    newest = lengths % layout.tokens
    rolling = layout.append(rolling, k_new, v_new, newest)
    return block.finish(params, x, layout.attend(q, pool, used, rolling, newest)), rolling, q, k_new


def group_predict(plan: Plan, block: BlockFunctions) -> Callable[..., Any]:
    """A layer's selection before its own step: (params, queries, adapter, x, summary, lengths, ids) → ids [B, M].

    `queries` are the layer's query weights, in the summary's dtype: scores need no more. With the layer's own input
    the selection is exact but for that; with the input of the layer before it is the paper's approximation.
    """
    view = _SummaryView(plan)

    def predict(params: Params, queries, adapter, x, summary, lengths, ids):
        del ids  # given for their memory alone
        q = block.queries(params, queries, x, lengths, lengths + 1)
        return _select(plan, block, q, adapter, view.see(summary), lengths)

    return predict


def selection_of(plan: Plan) -> Selection:
    """The plan's selection, which a valid plan of this policy has."""
    assert plan.selection is not None
    return plan.selection


def _select(
    plan: Plan,
    block: BlockFunctions,
    q: Float[Array, "B Hkv R D"],
    adapter: Any,
    summary: Any,
    lengths: Int[Array, " B"],
) -> Int[Array, "B M"]:
    choice, g = selection_of(plan), plan.group_tokens
    scores = strategy_of(plan, block).score(q, adapter, summary, lengths)
    return select(scores, lengths // g, choice.selected_groups, choice.sink_groups, choice.recent_groups)
