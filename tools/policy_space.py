"""What `search_policies.py` may choose for a policy that selects, at a given memory.

A setting says everything but how many groups a row keeps: as many as fit beside its summary in the share of the
memory that it fills.
Every system gets what its paper leaves open, and what this engine offers to all: how heads are put together, when and
how often groups are selected, and groups that are always attended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import structs
from policies import policy_plan, published

from swapkv_jax import Plan, PlanError, UsageError
from swapkv_jax.group_graphs import selection_of
from swapkv_jax.models import Geometry
from swapkv_jax.planner import load_buckets
from swapkv_jax.selection import Aggregate, Lookahead
from swapkv_jax.strategies.sizes import pinned_groups

SINK_TOKENS = 4  # where there are any: our own default


class Setting(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One point of a policy's space.

    Attributes:
      group_tokens: G. rank: r; 0 where the summary has none.
      share: M/C, of the groups kept how many are selected anew. The others are kept as long as they last, and
        attended.
      recent_tokens: of complete groups that are always attended, rounded up to groups, one at least; 0: as published.
      sink: whether the first tokens are.
      outliers: shadowkv's groups with exact keys, as a share of its paper's.
      refresh: steps from one selection to the next.
      filled: of the memory that it may take. To read or attend less is faster.
    """

    group_tokens: int
    rank: int
    share: float = 1.0
    recent_tokens: int = 0
    sink: bool = False
    outliers: float = 0.0
    aggregate: Aggregate = "sum"
    lookahead: Lookahead = "layer"
    refresh: int = 1
    filled: float = 1.0


Axes = Mapping[str, Sequence[Any]]
_OF_ALL: Axes = {
    "share": (0.25, 0.5, 0.75, 1.0),
    "recent_tokens": (0, 16, 32, 64),
    "sink": (False, True),
    "outliers": (0.0,),
    "aggregate": ("sum", "softmax"),
    "lookahead": ("layer", "step"),
    "refresh": (1, 2, 4, 8, 16, 32),
    "filled": (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0),
}
AXES: Mapping[str, Axes] = {
    "group": {**_OF_ALL, "group_tokens": (2, 4, 8, 16), "rank": (8, 16, 24, 32, 48, 64, 96)},
    "quest": {**_OF_ALL, "group_tokens": (8, 16, 32, 64, 128), "rank": (0,)},
    "loki": {**_OF_ALL, "group_tokens": (1, 2, 4), "rank": (2, 4, 8, 12, 16, 24)},
    "infinigen": {**_OF_ALL, "group_tokens": (1, 2, 4), "rank": (2, 4, 8, 12, 19, 24)},
    "shadowkv": {
        **_OF_ALL,
        "group_tokens": (4, 8, 16, 32, 64),
        "rank": (4, 8, 16, 30, 60),
        "outliers": (0.0, 0.5, 1.0),
    },
}
"""Per policy, each field's values in rising order. Ranks beyond the keys' size are left out, see `Space.of`."""
_SIZES = ("selected_groups", "reuse_slots", "sink_groups", "recent_groups", "outlier_groups", "load_buckets")
"""Fields of a plan that a search chooses by others, see `Setting`."""
_FIRST: Mapping[str, Mapping[str, Any]] = {
    "group": {"recent_tokens": 32, "sink": True, "aggregate": "softmax"},  # our own defaults
    "quest": {},
    "loki": {},
    "infinigen": {},
    "shadowkv": {"recent_tokens": 32, "outliers": 1.0, "aggregate": "softmax"},
}
"""Where each policy's walks start in what is no size: as its paper has it."""
FEATURES = 10


@dataclass(frozen=True, kw_only=True)
class Space:
    """The settings of `policy` that have a plan for `memory` (a fraction of the whole KV's bytes).

    Attributes:
      request: what else `make_plan` is asked for; batch and max_context at least.
      axes: each field's values in rising order, all fields of `Setting`.
      fixed: choices of every plan, as `--set` says them.
    """

    policy: str
    geometry: Geometry
    memory: float
    request: Mapping[str, Any]
    axes: Axes
    fixed: Mapping[str, Any] = field(default_factory=dict)
    _plans: dict[Setting, Plan | PlanError] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        policy: str,
        geometry: Geometry,
        memory: float,
        *,
        fixed: Mapping[str, Any] | None = None,
        **request: Any,
    ) -> Space:
        """The space that `AXES` has for a policy, without ranks beyond the size of keys, and with what is `fixed`.

        Raises:
          UsageError: it fixes a size that the search chooses by others.
        """
        fixed = {} if fixed is None else fixed
        if sizes := [name for name in _SIZES if name in fixed]:
            raise UsageError(
                f"--set {policy}.{sizes[0]} is what the search is for; leave it out, or set another field"
            )
        size = geometry.head_dim if policy in ("loki", "infinigen") else geometry.kv_heads * geometry.head_dim
        axes = dict(AXES[policy])
        axes["rank"] = tuple(rank for rank in axes["rank"] if rank <= size) or (size,)
        for name in axes.keys() & fixed:
            axes[name] = (max(fixed[name], default=1) if name == "refresh" else fixed[name],)
        return cls(policy=policy, geometry=geometry, memory=memory, request=request, axes=axes, fixed=fixed)

    def plan(self, setting: Setting) -> Plan:
        """The setting's plan, with as many slots as fit the share of the memory that it fills.

        Raises:
          PlanError: there is no room for its pinned groups and one more.
        """
        if setting not in self._plans:
            try:
                self._plans[setting] = self._planned(setting)
            except PlanError as error:
                self._plans[setting] = error
        plan = self._plans[setting]
        if isinstance(plan, PlanError):
            raise plan
        return plan

    def fits(self, setting: Setting) -> bool:
        """Whether it has a plan."""
        try:
            self.plan(setting)
        except PlanError:
            return False
        return True

    def _planned(self, setting: Setting) -> Plan:
        groups = self._groups(setting)
        if setting.share == 1:
            return self._sized(setting, groups)
        first = selection_of(
            self._sized(setting, groups, load_buckets=load_buckets(self.request["batch"], 1))
        )
        wanted = max(min(groups, 1 + pinned_groups(first)), round(setting.share * first.reuse_slots))
        plan = self._sized(setting, wanted)
        selected = selection_of(plan).selected_groups  # fewer where loads for so many left no room for them
        return plan if selected == wanted else self._sized(setting, selected)

    def _groups(self, setting: Setting) -> int:
        """That a row comes to."""
        return -(-self.request["max_context"] // setting.group_tokens)

    def _sized(self, setting: Setting, selected: int, **more: Any) -> Plan:
        given = self.choices(setting, selected) | more
        return policy_plan(
            self.geometry, self.policy, given, memory=setting.filled * self.memory, **self.request
        )

    def choices(self, setting: Setting, selected: int) -> dict[str, Any]:
        """What the setting says to `policy_plan`, where so many groups are selected."""
        g = setting.group_tokens
        choices: dict[str, Any] = {
            "group_tokens": g,
            "selected_groups": selected,
            "sink_groups": -(-SINK_TOKENS // g) if setting.sink else 0,
            "recent_groups": max(1, -(-setting.recent_tokens // g)),
            "aggregate": setting.aggregate,
            "lookahead": setting.lookahead,
            "refresh": () if setting.refresh == 1 else (setting.refresh,) * self.geometry.layers,
        }
        if setting.rank:
            choices["rank"] = setting.rank
        if self.policy == "shadowkv":
            request = {"batch": self.request["batch"], "context": self.request["max_context"]}
            known = published(self.geometry, "shadowkv", {"group_tokens": g}, **request)
            choices["outlier_groups"] = round(setting.outliers * known["outlier_groups"])
        return {**choices, **self.fixed}

    def chosen(self, setting: Setting) -> dict[str, Any]:
        """What `policy_plan` is to be given, with all of the memory, for the setting's plan. Where as much is kept as
        fits and all of it selected anew, that is said by more groups than can be kept, so that it holds for other
        contexts and batches too."""
        if setting.share == setting.filled == 1:
            return self.choices(setting, self._groups(setting))
        sizes = selection_of(self.plan(setting))
        choices = self.choices(setting, sizes.selected_groups)
        return choices if setting.filled == 1 else choices | {"reuse_slots": sizes.reuse_slots}

    # ---- what the search asks ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Setting]:
        """Those that have a plan."""
        points = (
            dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())
        )
        return filter(self.fits, (Setting(**point) for point in points))

    def neighbours(self, setting: Setting) -> Iterator[Setting]:
        """Those nearest in one field, either way, that have another plan."""
        for name, values in self.axes.items():
            at = values.index(getattr(setting, name))
            for way in (reversed(values[:at]), values[at + 1 :]):
                near = (structs.replace(setting, **{name: value}) for value in way)
                yield from itertools.islice((s for s in near if self._differ(s, setting)), 1)

    def _differ(self, setting: Setting, other: Setting) -> bool:
        return self.fits(setting) and self.plan(setting) != self.plan(other)

    def starts(self) -> list[Setting]:
        """A setting of every group size, otherwise as published: of the largest rank that leaves slots half of the
        memory, else of the smallest.

        Raises:
          PlanError: no setting of any group size has a plan.
        """
        found = []
        for tokens in self.axes["group_tokens"]:
            fitting = [s for s in self._of_size(tokens) if self.fits(s)]
            half = [s for s in fitting if self._slots(s) >= self.memory / 2]
            found += half[:1] or fitting[-1:]
        if not found:
            policy_plan(
                self.geometry, self.policy, {}, memory=self.memory, **self.request
            )  # says what it needs
            raise PlanError(
                f"policy {self.policy} has no setting that fits {self.memory:.4f} of the whole KV's memory"
            )
        return found

    def _of_size(self, tokens: int) -> Iterator[Setting]:
        """Settings to start from, as they are preferred: the largest rank first, pinned as published before not."""
        first = {name: values[0] for name, values in self.axes.items()}
        plain = {
            **first,
            "group_tokens": tokens,
            **{name: self.axes[name][-1] for name in ("share", "filled")},
        }
        wanted = {name: value for name, value in _FIRST[self.policy].items() if value in self.axes[name]}
        for fields in ({**plain, **wanted}, plain):
            for rank in reversed(self.axes["rank"]):
                yield Setting(**{**fields, "rank": rank})

    def _slots(self, setting: Setting) -> float:
        plan = self.plan(setting)
        return selection_of(plan).reuse_slots * plan.group_tokens / plan.max_context

    def features(self, setting: Setting) -> list[float]:
        """What a setting's loss and time may depend on, each about as much from one value to the next: `FEATURES`
        numbers, of which the first two stand for its memory."""
        s = setting
        attended = self._slots(setting) * self.request["max_context"]
        return [
            math.log2(attended),
            math.log2(max(1, s.rank)),
            math.log2(s.group_tokens),
            math.log2(s.share),
            math.log2(1 + s.recent_tokens / 16),
            float(s.sink),
            s.outliers,
            float(s.aggregate == "softmax"),
            float(s.lookahead == "step"),
            float(s.refresh - 1),
        ]
