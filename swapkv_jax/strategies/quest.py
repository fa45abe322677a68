"""Bounds of each group's keys (Quest, arXiv 2406.10774).

The summary of a group is the least and the largest value of every dimension of its keys, per KV head, so that

    Σ_d max(q_d · least_d, q_d · largest_d)

is no less than the dot product of a query with any key of the group: the most that a token there could count. Quest's
group is a page of 16 tokens; larger ones take less memory, and their bounds are looser. Its memory is 2·Hkv·D numbers
per group, whatever the rank.

Adapted to a disk as KVSwap adapts its peers: Quest keeps all KV on the device and selects for every head apart, here
a row's heads share what is read, their bounds put together as `aggregate` says (`sum`: their mean), and the selection
is made one layer or one token ahead. Quest attends everything in its first two layers, here they select like the
others.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from swapkv_jax.predictor import head_scores
from swapkv_jax.strategies.places import PlaceStrategy


class Quest(PlaceStrategy):
    def summarise(self, k: Float[Array, "1 Hkv D S"], adapter: Any) -> Float[Array, "1 P w"]:
        del adapter
        groups = [jax.lax.slice_in_dim(k, i, None, self._group_tokens, -1) for i in range(self._group_tokens)]
        stacked = jnp.stack(groups, axis=-1)  # [1, Hkv, D, P, G]
        return _flat(stacked.min(axis=-1).transpose(0, 3, 1, 2), stacked.max(axis=-1).transpose(0, 3, 1, 2))

    def place(
        self, newest: Float[Array, "B Hkv D"], group: Float[Array, "B Hkv G D"] | None, adapter: Any
    ) -> Float[Array, "B 1 w"]:
        del adapter
        keys = newest[:, :, None] if group is None else group
        return _flat(keys.min(axis=2)[:, None], keys.max(axis=2)[:, None])

    def score(
        self,
        q: Float[Array, "B Hkv R D"],
        adapter: Any,
        summary: Float[Array, "B P w"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B N"]:
        del adapter
        q = q.astype(jnp.float32)
        # A product with the larger of two values is one with the largest where q is positive, else with the least.
        queries = jnp.concatenate([jnp.minimum(q, 0), jnp.maximum(q, 0)], axis=-1)  # [B, Hkv, R, 2·D]
        complete, scale = lengths // self._group_tokens, q.shape[-1] ** -0.5
        return head_scores(queries, summary, complete, 1, self._aggregate, scale=scale)


def _flat(least: Float[Array, "B P Hkv D"], largest: Float[Array, "B P Hkv D"]) -> Float[Array, "B P w"]:
    """Per KV head the least values, then the largest; float32."""
    both = jnp.concatenate([least, largest], axis=-1).astype(jnp.float32)
    return both.reshape(*both.shape[:2], -1)
