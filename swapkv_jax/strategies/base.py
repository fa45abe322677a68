"""What policy `group` asks of a strategy: pure functions that become part of its graphs.

Shapes: B rows, Hkv KV heads, R query heads per KV head, D head dim, S tokens of a row's capacity, G tokens per group,
N = S/G groups. A summary is the arrays that `sizes.summary_parts` says. `adapter` is the layer's calibrated
directions, float32 [Hkv·D, r], or () where a strategy has none.
"""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float, Int


class Strategy(Protocol):
    @property
    def fill(self) -> Any:
        """(summary, adapter, k [1, Hkv, D, S], row) → summary with a prefilled row's post-RoPE keys in it. Where
        records have no keys it also takes the row's length."""
        ...

    def advance(
        self,
        summary: Any,
        adapter: Any,
        newest: Float[Array, "B Hkv D"],
        group: Float[Array, "B Hkv G D"] | None,
        lengths: Int[Array, " B"],
    ) -> Any:
        """The summary with each row's newest key, of the token at `lengths`, in it. `group`: the keys of the rolling
        buffer that the token is in, None where a place is one token."""
        ...

    def score(
        self, q: Float[Array, "B Hkv R D"], adapter: Any, summary: Any, lengths: Int[Array, " B"]
    ) -> Float[Array, "B N"]:
        """How much each complete group of rows that hold `lengths` tokens matters to the queries, float32; -inf for
        the other groups, whatever their places hold."""
        ...
