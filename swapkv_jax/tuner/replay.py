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
from swapkv_jax.models import Model
from swapkv_jax.models.blocks import query_weights, rms_norm, split_block
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
        self._model, self._geometry = model, model.geometry
        self._tokens = np.asarray(following, np.int32)
        self.rows, self.steps = self._tokens.shape
        self.context = len(prompts[0])
        self._params = jax.tree.map(jax.device_put, model.params)
        self._layers = self._params["layers"]
        self._block = split_block(self._geometry, model.dtype)
        self._cache = [self._load(prefilled, layer) for layer in range(self._geometry.layers)]
        self._segment = jax.jit(self._segment_function())
        self._head = jax.jit(self._head_function())
        self._reference = self._attend_all()

    def _load(self, prefilled: Prefilled, layer: int) -> tuple[jax.Array, jax.Array]:
        g, capacity = self._geometry, self.context + self.steps
        k = np.zeros((self.rows, g.kv_heads, g.head_dim, capacity), self._model.dtype)
        v = np.zeros((self.rows, g.kv_heads, capacity, g.head_dim), self._model.dtype)
        for row in range(self.rows):
            k[row, ..., : self.context], v[row, :, : self.context] = prefilled.kv(row, layer)
        return put(k), put(v)

    # ---- graphs ------------------------------------------------------------------------------------------

    def _segment_function(self) -> Any:
        block = self._block

        def segment(params, x, k, v, seen, lengths):
            q, k_new, v_new = block.project(params, x, lengths, lengths + 1)
            return block.finish(params, x, attend_seen(q, k, v, k_new, v_new, seen)), k_new, v_new

        return segment

    def _head_function(self) -> Any:
        geometry = self._geometry

        def head(params, x):
            table = params["embed"] if geometry.tied else params["head"]
            y = rms_norm(x, params["final_norm"], geometry.norm_eps)
            return jnp.einsum("vh,bh->bv", table, y, preferred_element_type=jnp.float32)

        return head

    def _select_function(self, choice: Selection) -> Any:
        block = self._block

        def chosen(params, queries, adapter, x, summary, lengths, complete):
            q = block.queries(params, queries, x, lengths, lengths + 1)
            query = low_rank_query(q, adapter, choice.aggregate)
            scores = group_scores(query, summary, complete, 1, choice.aggregate)
            return select(scores, complete, choice.selected_groups, choice.sink_groups, choice.recent_groups)

        return chosen

    # ---- decoding ----------------------------------------------------------------------------------------

    def _attend_all(self) -> np.ndarray:
        """Logits [T, B, V] with every token attended."""
        logits = []
        for step in range(self.steps):
            length = self.context + step
            seen = np.broadcast_to(
                np.arange(length - step + self.steps) < length, (self.rows, self._capacity)
            )
            x = self._embed(step)
            for layer in range(len(self._layers)):
                x = self._layer(layer, x, seen, length)
            logits.append(fetch(self._head(self._params, x)))
        return np.stack(logits)

    @property
    def _capacity(self) -> int:
        return self.context + self.steps

    def _embed(self, step: int) -> jax.Array:
        return self._params["embed"][self._tokens[:, step]]

    def _layer(self, layer: int, x: jax.Array, seen: np.ndarray, length: int) -> jax.Array:
        """One layer's step over the `seen` tokens [B, S]; its new key and value join the cache."""
        lengths = np.full(self.rows, length, np.int32)
        x, k_new, v_new = self._segment(self._layers[layer], x, *self._cache[layer], seen, lengths)
        self._cache[layer] = _append(*self._cache[layer], k_new, v_new, np.int32(length))
        return x

    def run(self, plan: Plan, adapter: Adapter) -> Replayed:
        """Decodes as policy `group` would under `plan`, whose summary is of group means; batch and context are the
        calibration's. `adapter` is for means of `plan.group_tokens` tokens."""
        choice, g, count = selection_of(plan), plan.group_tokens, len(self._layers)
        assert choice.summary == "group", "the replay has no summary of tokens"
        vectors = [put(part) for part in adapter.slice(choice.rank).vectors]
        dtype = jnp.dtype(choice.summary_dtype)
        columns = self._geometry.heads * self._geometry.head_dim
        queries = [query_weights(p, self._geometry, columns).astype(dtype) for p in self._layers]
        summaries = [
            _summary(k, a, group_tokens=g, dtype=choice.summary_dtype)
            for (k, _), a in zip(self._cache, vectors, strict=True)
        ]
        chosen = jax.jit(self._select_function(choice))
        groups = self._capacity // g
        table = SlotTable(count, self.rows, choice.reuse_slots, groups, choice.replacement)
        refresh = choice.refresh or (1,) * count
        wanted = np.full((count, self.rows, choice.selected_groups), -1, np.int32)
        kl, top1, misses = [], [], []

        def select_for(layer: int, x: jax.Array, length: int, complete: int) -> jax.Array:
            return chosen(
                self._layers[layer],
                queries[layer],
                vectors[layer],
                x,
                summaries[layer],
                np.full(self.rows, length, np.int32),
                np.full(self.rows, complete, np.int32),
            )

        for step in range(self.steps):
            length, missed = self.context + step, []
            complete, newest = length // g, length // g - 1 if step and length % g == 0 else -1
            x = before = self._embed(step)
            for layer in range(count):
                if step == 0 or (step + layer) % refresh[layer] == 0:
                    if choice.lookahead == "layer" or step == 0:
                        # The layer before's input selects; the first layer has its own only. (An engine's first
                        # step under `step` lookahead selects by each layer's own input.)
                        source = before if choice.lookahead == "layer" else x
                        wanted[layer] = fetch(select_for(layer, source, length, complete))
                elif newest >= 0:
                    wanted[layer] = np.column_stack([np.full(self.rows, newest), wanted[layer][:, :-1]])
                request = table.request(layer, wanted[layer])
                table.publish(request)
                missed.append(request.misses)
                before, mine = x, x
                x = self._layer(layer, x, self._seen(table, layer, wanted[layer], choice, g, length), length)
                if (length + 1) % g == 0:
                    summaries[layer] = _complete(
                        summaries[layer],
                        vectors[layer],
                        self._cache[layer][0],
                        np.int32(length // g),
                        group_tokens=g,
                        dtype=choice.summary_dtype,
                    )
                if choice.lookahead == "step" and (step + 1 + layer) % refresh[layer] == 0:
                    wanted[layer] = fetch(select_for(layer, mine, length, (length + 1) // g))
            logits = fetch(self._head(self._params, x))
            kl.append(divergence(self._reference[step], logits))
            top1.append(self._reference[step].argmax(-1) == logits.argmax(-1))
            misses.append(tuple(missed))
        selected = min(choice.selected_groups, self.context // g) * self.rows * count
        return Replayed(
            kl=float(np.mean(kl)),
            top1=float(np.mean(top1)),
            rows=self.rows,
            misses=tuple(misses[min(COLD, len(misses) - 1) :]),
            selected=float(selected),
        )

    def _seen(
        self, table: SlotTable, layer: int, wanted: np.ndarray, choice: Selection, g: int, length: int
    ) -> np.ndarray:
        """Which tokens [B, S] a step of the layer attends: those of groups in slots, and the rolling buffer's."""
        complete = length // g
        if choice.attended == "kept":
            every = np.broadcast_to(np.arange(self._capacity // g), (self.rows, self._capacity // g))
            attended = table.lookup(layer, every) >= 0
        else:
            attended = np.zeros((self.rows, self._capacity // g + 1), np.bool_)
            np.put_along_axis(attended, wanted, True, axis=1)  # -1 is the last column, which is cut off
            attended = attended[:, :-1]
        seen = np.zeros((self.rows, self._capacity), np.bool_)
        seen[:, : complete * g] = np.repeat(attended[:, :complete], g, axis=1)
        seen[:, complete * g : length] = True
        return seen


@partial(jax.jit, donate_argnums=(0, 1))
def _append(k: jax.Array, v: jax.Array, k_new: jax.Array, v_new: jax.Array, length: jax.Array) -> Any:
    zero = length * 0
    k = jax.lax.dynamic_update_slice(k, k_new[..., None], (zero, zero, zero, length))
    return k, jax.lax.dynamic_update_slice(v, v_new[:, :, None], (zero, zero, length, zero))


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
