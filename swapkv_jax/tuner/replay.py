"""Policy `group` replayed over a captured prefill: what a plan loses, and what it would have to read.

All keys and values stay in memory, and a mask says which of them the policy would attend. That is one to two orders
cheaper than an engine per plan, and reads no disk. Selection and slot table are the engine's own.

Shapes: B rows, S tokens of capacity, L layers, N groups a row can have, P places of the summary, r its rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jaxtyping import Array, Float, Int

from swapkv_jax.adapter import Adapter
from swapkv_jax.attention import attend_seen
from swapkv_jax.group_graphs import selection_of
from swapkv_jax.models import DTYPES, Model
from swapkv_jax.models.blocks import BlockFunctions, query_weights, rms_norm, split_block
from swapkv_jax.models.products import multiply
from swapkv_jax.plan import Plan
from swapkv_jax.predictor import group_means, group_scores, low_rank_query, select, summarise
from swapkv_jax.prefilled import Prefilled
from swapkv_jax.quality import divergence
from swapkv_jax.selection import Selection
from swapkv_jax.slots import SlotTable
from swapkv_jax.staging import fetch, put

COLD = 4  # first steps, in which slots fill up, do not count as reads of a step


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan did on calibration text.

    Attributes:
      kl, top1: mean divergence from attending everything (nats per token), share of equal likeliest tokens.
      rows: of the calibration. misses: [step][layer], groups that no slot held, all rows together; without the
        first steps.
      selected: groups selected per step, all layers and rows.
    """

    kl: float
    top1: float
    rows: int
    misses: tuple[tuple[int, ...], ...]
    selected: float

    @property
    def reuse(self) -> float:
        """Selected groups that needed no read, as a fraction of all selected."""
        return 1 - float(np.mean([sum(step) for step in self.misses])) / self.selected


class Replay:
    """A captured prefill on the device, and the tokens that follow it. One `run` at a time."""

    def __init__(
        self,
        model: Model,
        prefilled: Prefilled,
        prompts: Sequence[Sequence[int]],
        following: Sequence[Sequence[int]],
    ):
        """Loads keys and values, and decodes `following` [B, T] once with all of them.

        Args:
          prompts: of one length; `prefilled` is theirs. following: what each row decodes, token by token.
        """
        prefilled.check(model, prompts)
        self._model, self.geometry = model, model.geometry
        self._tokens = np.asarray(following, np.int32)
        self.rows, self.steps = self._tokens.shape
        self.context = len(prompts[0])
        self._params = jax.tree.map(jax.device_put, model.params)
        self.layers = self._params["layers"]
        self.block = split_block(self.geometry, model.dtype)
        self._prefilled, self._kv_dtype = prefilled, model.dtype
        self.cache = [self._load(layer) for layer in range(self.geometry.layers)]
        self._segment = jax.jit(self._segment_function())
        self._head = jax.jit(self._head_function())
        self._reference = self._attend_all()

    @property
    def capacity(self) -> int:
        return self.context + self.steps

    def _load(self, layer: int) -> tuple[jax.Array, jax.Array]:
        g, dtype = self.geometry, DTYPES[self._model.dtype]
        k = np.zeros((self.rows, g.kv_heads, g.head_dim, self.capacity), dtype)
        v = np.zeros((self.rows, g.kv_heads, self.capacity, g.head_dim), dtype)
        for row in range(self.rows):
            k[row, ..., : self.context], v[row, :, : self.context] = self._prefilled.kv(row, layer)
        return put(k), put(v)

    def _keep_as(self, dtype: str) -> None:
        """Has keys and values as a cache of `dtype` would give them back."""
        if dtype == self._kv_dtype:
            return
        for layer in range(len(self.layers)):
            k, v = self._load(layer)
            self.cache[layer] = _rounded(k, dtype), _rounded(v, dtype)
        self._kv_dtype = dtype

    # ---- graphs ------------------------------------------------------------------------------------------

    def _segment_function(self) -> Any:
        block = self.block

        def segment(params, x, k, v, seen, lengths):
            q, k_new, v_new = block.project(params, x, lengths, lengths + 1)
            return block.finish(params, x, attend_seen(q, k, v, k_new, v_new, seen)), k_new, v_new

        return segment

    def _head_function(self) -> Any:
        geometry = self.geometry

        def head(params, x):
            table = params["embed"] if geometry.tied else params["head"]
            y = rms_norm(x, params["final_norm"], geometry.norm_eps)
            return multiply(table, y, jnp.float32)

        return head

    # ---- decoding ----------------------------------------------------------------------------------------

    def _attend_all(self) -> np.ndarray:
        """Logits [T, B, V] with every token attended."""
        logits = []
        for step in range(self.steps):
            length = self.context + step
            seen = np.broadcast_to(np.arange(self.capacity) < length, (self.rows, self.capacity))
            x = self._embed(step)
            for layer in range(len(self.layers)):
                x = self._layer(layer, x, seen, length)
            logits.append(fetch(self._head(self._params, x)))
        return np.stack(logits)

    def _embed(self, step: int) -> jax.Array:
        return self._params["embed"][self._tokens[:, step]]

    def _layer(self, layer: int, x: jax.Array, seen: np.ndarray, length: int) -> jax.Array:
        """One layer's step over the `seen` tokens [B, S]; its new key and value join the cache."""
        lengths = np.full(self.rows, length, np.int32)
        x, *new = self._segment(self.layers[layer], x, *self.cache[layer], seen, lengths)
        k_new, v_new = (_rounded(part, self._kv_dtype) for part in new)
        self.cache[layer] = _append(*self.cache[layer], k_new, v_new, np.int32(length))
        return x

    def run(self, plan: Plan, adapter: Adapter) -> Replayed:
        """Decodes as policy `group` would under `plan`, whose summary is of group means; batch and context are the
        calibration's. `adapter` is for means of `plan.group_tokens` tokens."""
        self._keep_as(plan.cache_dtype)
        state = _GroupState(self, plan, adapter)
        kl, top1, misses = [], [], []
        for step in range(self.steps):
            length, missed = self.context + step, []
            x = before = self._embed(step)
            for layer in range(len(self.layers)):
                state.want(step, layer, x if state.choice.by_step(step) else before)
                missed.append(state.request(layer))
                before = x
                x = self._layer(layer, x, state.seen(layer, length), length)
                state.appended(step, layer, before)
            logits = fetch(self._head(self._params, x))
            kl.append(divergence(self._reference[step], logits))
            top1.append(self._reference[step].argmax(-1) == logits.argmax(-1))
            misses.append(tuple(missed))
        selected = min(state.choice.selected_groups, self.context // plan.group_tokens)
        return Replayed(
            kl=float(np.mean(kl)),
            top1=float(np.mean(top1)),
            rows=self.rows,
            misses=tuple(misses[min(COLD, len(misses) - 1) :]),
            selected=float(selected * self.rows * len(self.layers)),
        )


class _GroupState:
    """What policy `group` keeps beside keys and values: summaries, selections and the slot table of all layers."""

    def __init__(self, replay: Replay, plan: Plan, adapter: Adapter):
        self.choice, self._g, self._replay = selection_of(plan), plan.group_tokens, replay
        assert self.choice.summary == "group", "the replay has no summary of tokens"
        layers, rows = replay.layers, replay.rows
        self._adapters = [put(part) for part in adapter.slice(self.choice.rank).vectors]
        geometry, dtype = replay.geometry, jnp.dtype(self.choice.summary_dtype)
        columns = geometry.heads * geometry.head_dim
        self._queries = [query_weights(params, geometry, columns).astype(dtype) for params in layers]
        self._summaries = [
            _summary(k, vectors, group_tokens=self._g, dtype=self.choice.summary_dtype)
            for (k, _), vectors in zip(replay.cache, self._adapters, strict=True)
        ]
        self._select = jax.jit(_select_function(replay.block, self.choice))
        self._groups = replay.capacity // self._g
        self._table = SlotTable(
            len(layers), rows, self.choice.reuse_slots, self._groups, self.choice.replacement
        )
        self._wanted = np.full((len(layers), rows, self.choice.selected_groups), -1, np.int32)

    def _selected(self, layer: int, x: jax.Array, length: int, complete: int) -> np.ndarray:
        replay = self._replay
        lengths, groups = (np.full(replay.rows, n, np.int32) for n in (length, complete))
        ids = self._select(
            replay.layers[layer],
            self._queries[layer],
            self._adapters[layer],
            x,
            self._summaries[layer],
            lengths,
            groups,
        )
        return fetch(ids)

    def want(self, step: int, layer: int, x: jax.Array) -> None:
        """Settles which groups the layer wants in `step`, by the input `x` of the layer before. (Where the step
        before selects that has been done, but in the first step, where the layer's own input selects.)"""
        length = self._replay.context + step
        complete = length // self._g
        if self.choice.due(layer, step):
            if step == 0 or not self.choice.by_step(step):
                self._wanted[layer] = self._selected(layer, x, length, complete)
        elif length % self._g == 0:  # a group was completed since the last selection
            newest = np.full(self._replay.rows, complete - 1)
            self._wanted[layer] = np.column_stack([newest, self._wanted[layer][:, :-1]])

    def request(self, layer: int) -> int:
        """Gives slots to what the layer wants; how many groups would have been read."""
        request = self._table.request(layer, self._wanted[layer])
        self._table.publish(request)
        return request.misses

    def seen(self, layer: int, length: int) -> np.ndarray:
        """Which tokens [B, S] a step of the layer attends: those of groups in slots, and the rolling buffer's."""
        rows, g, complete = self._replay.rows, self._g, length // self._g
        if self.choice.attended == "kept":
            every = np.broadcast_to(np.arange(self._groups), (rows, self._groups))
            attended = self._table.lookup(layer, every) >= 0
        else:
            attended = np.zeros((rows, self._groups + 1), np.bool_)
            np.put_along_axis(
                attended, self._wanted[layer], True, axis=1
            )  # -1 is the last column, cut off here
        seen = np.zeros((rows, self._replay.capacity), np.bool_)
        seen[:, : complete * g] = np.repeat(attended[:, :complete], g, axis=1)
        seen[:, complete * g : length] = True
        return seen

    def appended(self, step: int, layer: int, x: jax.Array) -> None:
        """The layer's new keys are in the cache: a group that they complete joins the summary, and the
        layer's input `x` selects for the next step, where the lookahead is by a step."""
        length = self._replay.context + step
        if (length + 1) % self._g == 0:
            self._summaries[layer] = _complete(
                self._summaries[layer],
                self._adapters[layer],
                self._replay.cache[layer][0],
                np.int32(length // self._g),
                group_tokens=self._g,
                dtype=self.choice.summary_dtype,
            )
        if self.choice.by_step(step + 1) and self.choice.due(layer, step + 1):
            self._wanted[layer] = self._selected(layer, x, length, (length + 1) // self._g)


def _select_function(block: BlockFunctions, choice: Selection) -> Any:
    def chosen(params, queries, adapter, x, summary, lengths, complete):
        q = block.queries(params, queries, x, lengths, lengths + 1)
        query = low_rank_query(q, adapter, choice.aggregate)
        scores = group_scores(query, summary, complete, 1, choice.aggregate)
        return select(scores, complete, choice.selected_groups, choice.sink_groups, choice.recent_groups)

    return chosen


@partial(jax.jit, donate_argnums=(0, 1))
def _append(k: jax.Array, v: jax.Array, k_new: jax.Array, v_new: jax.Array, length: jax.Array) -> Any:
    zero = length * 0
    k = jax.lax.dynamic_update_slice(k, k_new[..., None].astype(k.dtype), (zero, zero, zero, length))
    return k, jax.lax.dynamic_update_slice(v, v_new[:, :, None].astype(v.dtype), (zero, zero, length, zero))


def _rounded(values: jax.Array, dtype: str) -> jax.Array:
    # Kept in float32 whatever it is rounded to: a CPU writes 16 bits by converting the whole array.
    return values.astype(jnp.dtype(dtype)).astype(jnp.float32)


@partial(jax.jit, static_argnames=("group_tokens", "dtype"))
def _summary(
    k: Float[Array, "B Hkv D S"], adapter: Float[Array, "N r"], *, group_tokens: int, dtype: str
) -> Float[Array, "B P r"]:
    whole = k.shape[-1] // group_tokens * group_tokens
    return _rounded(summarise(group_means(k[..., :whole], group_tokens), adapter), dtype)


@partial(jax.jit, static_argnames=("group_tokens", "dtype"), donate_argnums=0)
def _complete(
    summary: Float[Array, "B P r"],
    adapter: Float[Array, "N r"],
    k: Float[Array, "B Hkv D S"],
    group: Int[Array, ""],
    *,
    group_tokens: int,
    dtype: str,
) -> Float[Array, "B P r"]:
    zero = group * 0
    size = (*k.shape[:3], group_tokens)
    keys = jax.lax.dynamic_slice(k, (zero, zero, zero, group * group_tokens), size)
    mean = _rounded(summarise(group_means(keys, group_tokens), adapter), dtype)
    return jax.lax.dynamic_update_slice(summary, mean, (zero, group, zero))
