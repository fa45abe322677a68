"""The choices that the tuner makes, and the plans they stand for."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from swapkv_jax.models.geometry import Geometry
from swapkv_jax.plan import DType, Plan
from swapkv_jax.planner import NO_LIMITS, Budgets, load_buckets, make_plan
from swapkv_jax.selection import Lookahead, Selection

SINK_TOKENS, RECENT_TOKENS = (
    4,
    32,
)  # always attended: KVSwap attends neither and loses for it (docs of `Selection`)
_SIZES = ("group_tokens", "selected_tokens", "kept", "rank")


class Choice(msgspec.Struct, frozen=True, kw_only=True, order=True, forbid_unknown_fields=True):
    """One point of the space: `group_tokens` G; `selected_tokens` M·G; `kept` C/M; `rank` r of the summary; when
    groups are selected, and every how many steps."""

    group_tokens: int
    selected_tokens: int
    kept: float
    rank: int
    lookahead: Lookahead = "layer"
    refresh: int = 1

    def __str__(self) -> str:
        return (
            f"G {self.group_tokens}, M·G {self.selected_tokens}, C/M {self.kept:g}, r {self.rank}, lookahead "
            f"{self.lookahead}, refresh {self.refresh}"
        )


@dataclass(frozen=True, kw_only=True)
class Space:
    """What may be chosen, each field in rising order."""

    group_tokens: tuple[int, ...] = (2, 4, 8, 16)
    selected_tokens: tuple[int, ...] = (128, 192, 256, 320, 384, 448, 512, 640, 768, 1024)
    kept: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0, 3.0)
    rank: tuple[int, ...] = (8, 16, 24, 32, 48, 64, 96, 128)
    lookahead: tuple[Lookahead, ...] = ("layer", "step")
    refresh: tuple[int, ...] = (1, 2)

    def limited(self, geometry: Geometry, max_context: int) -> Space:
        """Without ranks beyond the keys' size, and without more tokens than there are."""
        size = geometry.kv_heads * geometry.head_dim
        tokens = tuple(n for n in self.selected_tokens if n < max_context) or self.selected_tokens[:1]
        ranks = tuple(r for r in self.rank if r <= size) or (size,)
        looks: tuple[Lookahead, ...] = self.lookahead if geometry.layers > 1 else ("layer",)
        return replace(self, selected_tokens=tokens, rank=ranks, lookahead=looks)

    def __iter__(self) -> Iterator[Choice]:
        names = Choice.__struct_fields__
        for values in itertools.product(*(getattr(self, name) for name in names)):
            yield Choice(**dict(zip(names, values, strict=True)))

    def neighbours(self, choice: Choice) -> list[Choice]:
        """The points one step away in one field, or up in one size and down in another."""
        axes = {name: getattr(self, name) for name in Choice.__struct_fields__}
        return [msgspec.structs.replace(choice, **move) for move in moves(axes, choice, traded=_SIZES)]

    def largest(self, group_tokens: int, fits: Callable[[Choice], bool]) -> list[Choice]:
        """The fitting choices of a group size that no other fitting one exceeds in tokens, slots and rank alike. More
        of these never loses more: if all of them lose too much, every choice does. Those far along in all three come
        first."""

        def places(choice: Choice) -> tuple[float, ...]:
            return (
                self.selected_tokens.index(choice.selected_tokens) / len(self.selected_tokens),
                self.kept.index(choice.kept) / len(self.kept),
                self.rank.index(choice.rank) / len(self.rank),
            )

        first = (self.lookahead[0], self.refresh[0])
        plain = [c for c in self if c.group_tokens == group_tokens and (c.lookahead, c.refresh) == first]
        largest: list[Choice] = []
        for choice in sorted(plain, key=lambda c: (sum(places(c)), c), reverse=True):
            exceeded = any(all(map(operator.le, places(choice), places(other))) for other in largest)
            if not exceeded and fits(choice):
                largest.append(choice)
        return largest


def moves(
    axes: Mapping[str, Sequence[Any]], point: Any, *, traded: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """The fields by which a point's neighbours on a grid differ from it: one is a step away, or, among those `traded`
    for one another, one is a step down and another a step up.

    Args:
      axes: each field's values, in order. point: has the fields as attributes, on the grid.
    """
    steps: dict[str, tuple[Any, Any]] = {}
    for name, values in axes.items():
        at = values.index(getattr(point, name))
        steps[name] = values[at - 1] if at else None, values[at + 1] if at + 1 < len(values) else None
        yield from ({name: value} for value in steps[name] if value is not None)
    for (one, (down, _)), (other, (_, up)) in itertools.permutations(steps.items(), 2):
        if one in traded and other in traded and down is not None and up is not None:
            yield {one: down, other: up}


def plan_of(
    choice: Choice,
    geometry: Geometry,
    *,
    batch: int,
    max_context: int,
    dtype: DType,
    platform: str,
    budgets: Budgets = NO_LIMITS,
    **fields: Any,
) -> Plan:
    """The plan of policy `group` that a choice stands for.

    With a DRAM budget as many rows as it holds are in DRAM too. `fields` are further fields of `Plan`.

    Raises:
      PlanError: sizes that cannot work, or that a budget does not hold.
    """
    g = choice.group_tokens
    recent, sink = -(-RECENT_TOKENS // g), -(-SINK_TOKENS // g)
    groups = -(-max_context // g)
    selected = max(sink + recent + (choice.refresh > 1), min(groups, choice.selected_tokens // g))
    slots = max(selected, min(groups, round(selected * choice.kept)))
    selection = Selection(
        selected_groups=selected,
        reuse_slots=slots,
        rank=choice.rank,
        sink_groups=sink,
        recent_groups=recent,
        lookahead=choice.lookahead,
        refresh=() if choice.refresh == 1 else (choice.refresh,) * geometry.layers,
        load_buckets=load_buckets(batch, selected),
    )
    return make_plan(
        geometry,
        cache="group",
        batch=batch,
        max_context=max_context,
        dtype=dtype,
        group_tokens=g,
        platform=platform,
        budgets=budgets,
        selection=selection,
        **fields,
    )


def held_bytes(plan: Plan, geometry: Geometry) -> int:
    """Bytes of memory that a plan takes beside the weights: on the device, in prefill too, and in DRAM."""
    memory = plan.memory(geometry)
    return memory.device + memory.aliased + memory.prefill + memory.dram
