"""The static choices of the `group` policy: what is selected, kept and read per layer, row and step."""

from __future__ import annotations

from typing import Literal

import msgspec

from swapkv_jax.errors import PlanError

Aggregate = Literal["sum", "softmax"]
Lookahead = Literal["step", "layer", "layer-then-step"]
Replacement = Literal["fifo", "lru", "all"]
Summary = Literal["token", "group"]
SummaryDType = Literal["float32", "bfloat16", "float16"]
Attended = Literal["selected", "kept"]
StrategyName = Literal["kvswap", "quest", "loki", "infinigen", "shadowkv"]


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a plan (KVSwap, arXiv 2511.11907).

    Attributes:
      selected_groups: M, groups attended per layer, row and step.
      reuse_slots: C, groups that a layer keeps on the device per row.
      rank: r of the low-rank K summary; σ = Hkv·D/r. (Of each KV head's under loki and infinigen.)
      sink_groups, recent_groups: the first and last complete groups, always among the selected.
      summary: what the summary keeps low-rank keys of: every token (the paper), or the mean of each group's
        keys, which takes G times less memory. The adapter must be calibrated for the same.
      summary_dtype: of the summary; scores are float32 whatever it is.
      aggregate: how query heads are put together, see `predictor`.
      lookahead: `step` selects with this step's queries for the next step, `layer` with a layer's input for
        the layer after it (the paper). `layer-then-step` is `layer` in a generation's first `opening_steps`, when
        what a prompt asks for must be there at once, and `step` from then on, when a slow disk has a step's time.
      replacement: which slot a missing group takes, see `slots`; `all` reuses nothing, as systems without a reuse
        buffer.
      attended: `selected` attends the selected groups (the paper), `kept` every group that is still in a slot
        too, which is exact for C instead of M groups and reads no more. The same where C = M.
      refresh: per layer, steps from one selection to the next; empty is 1 everywhere. Between two selections
        each newly completed group takes the place of the selected group that scored least.
      opening_steps: first steps of a generation, in which every layer selects whatever `refresh` says: what a prompt
        asks for is looked for then. Unset is 1; `opening` reads it.
      load_buckets: numbers of records that one load can carry, all rows together; more take several loads.
      strategy: what is summarised and how it is scored, see `strategies`; unset is `kvswap`, to which the above
        applies as it stands. `strategy_name` reads it.
      whole_layers: layers, rising, that keep every group in a slot and select nothing: those that lose most by what
        they do not see; unset is none. `whole` reads it.
      outlier_groups: groups of a prompt that are always selected and keep exact keys (shadowkv, which needs it).
    """

    selected_groups: int
    reuse_slots: int
    rank: int
    sink_groups: int = 1
    recent_groups: int = 8
    summary: Summary = "group"
    summary_dtype: SummaryDType = "bfloat16"
    aggregate: Aggregate = "softmax"
    lookahead: Lookahead = "layer"
    replacement: Replacement = "lru"
    attended: Attended = "kept"
    refresh: tuple[int, ...] = ()
    load_buckets: tuple[int, ...] = (8, 16, 32, 64, 96, 128)
    strategy: StrategyName | msgspec.UnsetType = msgspec.UNSET
    outlier_groups: int | msgspec.UnsetType = msgspec.UNSET
    whole_layers: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    opening_steps: int | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        # One form for one choice: plans of one meaning have one hash.
        if self.strategy == "kvswap":
            msgspec.structs.force_setattr(self, "strategy", msgspec.UNSET)
        if self.whole_layers == ():
            msgspec.structs.force_setattr(self, "whole_layers", msgspec.UNSET)
        if self.opening_steps == 1:
            msgspec.structs.force_setattr(self, "opening_steps", msgspec.UNSET)

    @property
    def whole(self) -> tuple[int, ...]:
        """The layers that keep every group."""
        return () if self.whole_layers is msgspec.UNSET else self.whole_layers

    @property
    def opening(self) -> int:
        """Steps from a generation's first on in which every layer selects."""
        return 1 if self.opening_steps is msgspec.UNSET else self.opening_steps

    @property
    def segments_select(self) -> bool:
        """Whether a step's segments ever select for the step after it."""
        return self.lookahead != "layer"

    def by_step(self, step: int) -> bool:
        """Whether what layers attend in a generation's step is selected in the step before. (Under `step` lookahead
        the first step, which has none before it, selects itself.)"""
        return self.lookahead == "step" or (self.lookahead == "layer-then-step" and step >= self.opening)

    def due(self, layer: int, step: int) -> bool:
        """Whether a layer that selects does so in a generation's step, counted from 0. Layers take turns."""
        return step < self.opening or not self.refresh or (step + layer) % self.refresh[layer] == 0

    @property
    def strategy_name(self) -> StrategyName:
        """Which of the `strategies` selects."""
        return "kvswap" if self.strategy is msgspec.UNSET else self.strategy

    def selections_per_step(self, layers: int) -> float:
        """How many of so many layers select in a step, on average."""
        steps = self.refresh or (1,) * layers
        return sum(1 / steps[layer] for layer in range(layers) if layer not in self.whole)

    def validate(self, key_size: int) -> None:
        """Raises PlanError naming what is wrong and what would work. `key_size`: Hkv·D."""
        for name, least, most in (("selected_groups", 1, 1 << 20), ("reuse_slots", 1, 1 << 20)):
            if not least <= getattr(self, name) <= most:
                raise PlanError(
                    f"{name} must be at least {least} and at most {most}, not {getattr(self, name)}"
                )
        if self.recent_groups < 1:
            raise PlanError(
                f"recent_groups must be at least 1, not {self.recent_groups}: the group that was just completed "
                "has not been scored yet"
            )
        if self.sink_groups < 0:
            raise PlanError(f"sink_groups must be 0 or more, not {self.sink_groups}")
        if self.sink_groups + self.recent_groups > self.selected_groups:
            raise PlanError(
                f"{self.sink_groups} sink and {self.recent_groups} recent groups do not fit into "
                f"{self.selected_groups} selected groups; use selected_groups of at least "
                f"{self.sink_groups + self.recent_groups}"
            )
        if self.reuse_slots < self.selected_groups:
            raise PlanError(
                f"reuse_slots {self.reuse_slots} cannot hold {self.selected_groups} selected groups; "
                f"use at least {self.selected_groups}"
            )
        if not 1 <= self.rank <= key_size:
            raise PlanError(f"rank {self.rank} is not between 1 and Hkv·D = {key_size}; use 8 to {key_size}")
        if self.opening < 1:
            raise PlanError(
                f"opening_steps must be at least 1, not {self.opening}: in the first step there is nothing to keep"
            )
        self._check_refresh()
        if (
            not self.load_buckets
            or min(self.load_buckets) < 1
            or list(self.load_buckets) != sorted(set(self.load_buckets))
        ):
            raise PlanError(f"load_buckets must be rising positive sizes, not {list(self.load_buckets)}")

    def _check_refresh(self) -> None:
        if not self.refresh:
            return
        if min(self.refresh) < 1:
            raise PlanError(
                f"refresh must be steps of at least 1 for every layer, not {list(self.refresh)}; leave it out to "
                "select in every step"
            )
        if max(self.refresh) > 1 and self.selected_groups <= self.sink_groups + self.recent_groups:
            raise PlanError(
                f"refresh of {max(self.refresh)} steps needs selected_groups of at least "
                f"{self.sink_groups + self.recent_groups + 1}, not {self.selected_groups}: a newly completed group "
                "takes the place of one that is neither sink nor recent"
            )
