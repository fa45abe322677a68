"""What policy `group` asks of a strategy: pure functions that become part of its graphs.

Shapes: B rows, Hkv KV heads, R query heads per KV head, D head dim, S tokens of a row's capacity, G tokens per group,
N = S/G groups, P places of the summary (tokens or groups), w numbers per place (`sizes.summary_width`). `adapter` is
the layer's calibrated directions, float32 [Hkv·D, r], or () where a strategy has none.
"""

from __future__ import annotations

from typing import Any, Protocol

from jaxtyping import Array, Float, Int


class Strategy(Protocol):
    def summarise(self, k: Float[Array, "1 Hkv D S"], adapter: Any) -> Float[Array, "1 P w"]:
        """The summary of a prefilled row's post-RoPE keys. What it says beyond the prompt is never looked at."""
        ...

    def place(
        self, newest: Float[Array, "B Hkv D"], group: Float[Array, "B Hkv G D"] | None, adapter: Any
    ) -> Float[Array, "B 1 w"]:
        """Each row's newest place, which the summary takes in. `group`: the keys of the rolling buffer that the
        newest token is in, None where a place is one token. A place of a group is right once the group is complete;
        nobody looks at it before."""
        ...

    def score(
        self,
        q: Float[Array, "B Hkv R D"],
        adapter: Any,
        summary: Float[Array, "B P w"],
        lengths: Int[Array, " B"],
    ) -> Float[Array, "B N"]:
        """How much each complete group of rows that hold `lengths` tokens matters to the queries, float32; -inf for
        the other groups, whatever their places hold."""
        ...
