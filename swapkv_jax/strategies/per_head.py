"""Keys of each KV head by themselves, in a few directions of that head: what Loki and InfiniGen have in common."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from swapkv_jax.predictor import head_scores
from swapkv_jax.strategies.places import PlaceStrategy


class PerHead(PlaceStrategy):
    """A place is a token: its key's coordinates, r per KV head. `adapter` [Hkv·D, r] has each head's D rows below
    those of the head before. A group counts by its best token (both systems select single tokens: G = 1)."""

    def summarise(self, k: Float[Array, "1 Hkv D S"], adapter: jax.Array) -> Float[Array, "1 S w"]:
        basis = adapter.astype(k.dtype).reshape(*k.shape[1:3], -1)
        coordinates = jnp.einsum("bkds,kdr->bskr", k, basis, preferred_element_type=jnp.float32)
        return coordinates.reshape(*coordinates.shape[:2], -1)

    def place(
        self, newest: Float[Array, "B Hkv D"], group: Float[Array, "B Hkv G D"] | None, adapter: jax.Array
    ) -> Float[Array, "B 1 w"]:
        del group
        return self.summarise(newest[..., None], adapter)

    def score(
        self,
        q: Float[Array, "B Hkv R D"],
        adapter: jax.Array,
        summary: Float[Array, "B S w"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B N"]:
        basis = adapter.reshape(q.shape[1], q.shape[-1], -1)
        queries = jnp.einsum("bkrd,kdc->bkrc", q.astype(jnp.float32), basis)
        complete, scale = lengths // self._group_tokens, q.shape[-1] ** -0.5
        return head_scores(queries, summary, complete, self._group_tokens, self._aggregate, scale=scale)
