"""What strategies have in common whose summary is one array, a place for every token or group."""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from swapkv_jax.plan import Plan
from swapkv_jax.selection import Aggregate, Selection
from swapkv_jax.strategies.writes import write, write_places


class PlaceStrategy(abc.ABC):
    """Subclasses say what a place holds and how it is scored."""

    def __init__(self, plan: Plan, choice: Selection):
        self._group_tokens, self._place_tokens = plan.group_tokens, plan.place_tokens
        self._aggregate: Aggregate = choice.aggregate

    @abc.abstractmethod
    def summarise(self, k: Float[Array, "1 Hkv D S"], adapter: Any) -> Float[Array, "1 P w"]:
        """The places of a prefilled row's post-RoPE keys. What they say beyond the prompt is never looked at."""

    @abc.abstractmethod
    def place(
        self, newest: Float[Array, "B Hkv D"], group: Float[Array, "B Hkv G D"] | None, adapter: Any
    ) -> Float[Array, "B 1 w"]:
        """Each row's newest place. `group`: None where a place is one token. A place of a group is right once the
        group is complete; nobody looks at it before."""

    @abc.abstractmethod
    def score(
        self, q: Float[Array, "B Hkv R D"], adapter: Any, summary: jax.Array, lengths: Int[Array, " B"]
    ) -> Float[Array, "B N"]:
        """See `Strategy`."""

    def fill(
        self,
        summary: Float[Array, "B P w"],
        adapter: Any,
        k: Float[Array, "1 Hkv D S"],
        row: Int[Array, ""],
    ) -> Float[Array, "B P w"]:
        zero = jnp.zeros((), jnp.int32)
        return write(summary, self.summarise(k, adapter), (row, zero, zero))

    def advance(
        self,
        summary: jax.Array,
        adapter: Any,
        newest: Float[Array, "B Hkv D"],
        group: Float[Array, "B Hkv G D"] | None,
        lengths: Int[Array, " B"],
    ) -> jax.Array:
        return write_places(summary, self.place(newest, group, adapter), lengths, self._place_tokens)
