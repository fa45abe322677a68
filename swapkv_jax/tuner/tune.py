"""The tuner put together: tables are measured as the search asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import jax
import msgspec
import xxhash

from swapkv_jax.adapter import Adapter
from swapkv_jax.capture import CapturedPrefill, capture
from swapkv_jax.disk_curve import ensure_disk_curve
from swapkv_jax.group_graphs import selection_of
from swapkv_jax.models import Model
from swapkv_jax.plan import DType, Plan
from swapkv_jax.planner.budgets import NO_LIMITS, Budgets
from swapkv_jax.planner.costs import DiskModel
from swapkv_jax.program import decode_specs
from swapkv_jax.rates import device_identity
from swapkv_jax.sampling import Sampling
from swapkv_jax.talk import Progress
from swapkv_jax.tiers import Syscalls
from swapkv_jax.tuner.choice import Choice, Space, held_bytes, plan_of
from swapkv_jax.tuner.host_work import Steps, fit_host_work, run_steps
from swapkv_jax.tuner.replay import Replay, Replayed
from swapkv_jax.tuner.search import Found, search
from swapkv_jax.tuner.step_time import HostWork, StepTime, step_time
from swapkv_jax.tuner.tables import Tables
from swapkv_jax.tuner.timing import GraphModel, Shape, time_graph

Told = Callable[[Choice, float, float], None]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What to tune for.

    Attributes:
      batch, max_context: the largest, for which the plan is made.
      memory: bytes that it may take beside the weights, DRAM's share included but for rows that `dram` pays for.
      loss: the most it may diverge from attending everything, in nats per token, on the calibration text.
      dram: bytes for whole rows in DRAM; None for none.
    """

    batch: int
    max_context: int
    memory: int
    loss: float
    dram: int | None = None


@dataclass(frozen=True, kw_only=True)
class Text:
    """Calibration text: prompts of one length, the tokens that follow each, where captured prefills are kept."""

    prompts: Sequence[Sequence[int]]
    following: Sequence[Sequence[int]]
    directory: Path

    def shorter(self, context: int) -> Text:
        """The first `context` tokens of each prompt, followed by its own next tokens."""
        count = len(self.following[0])
        return Text(
            prompts=[prompt[:context] for prompt in self.prompts],
            following=[
                [*prompt, *after][context : context + count]
                for prompt, after in zip(self.prompts, self.following, strict=True)
            ],
            directory=self.directory,
        )

    @property
    def digest(self) -> str:
        """Over all tokens."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode([self.prompts, self.following]))

    def prefilled(self, model: Model, progress: Progress | None) -> CapturedPrefill:
        """The prompts' prefill, computed now unless it was kept."""
        return capture(model, self.prompts, self.directory, progress=progress)


class Tuner:
    """An `Oracle` that measures. Every measurement is kept in `tables`."""

    def __init__(
        self,
        model: Model,
        goal: Goal,
        *,
        text: Text,
        adapters: dict[int, Adapter],
        disk: DiskModel,
        store_dir: Path,
        tables: Tables,
        progress: Progress | None = None,
    ):
        """
        Args:
          adapters: by the tokens whose mean keys they are for, one for every group size of the space.
          disk: that the plan is for. store_dir: on the disk of this machine, where engines run meanwhile.
        """
        self.model, self.goal, self.text, self.disk = model, goal, text, disk
        self.adapters, self.store_dir = adapters, store_dir
        self._tables, self._progress = tables, progress
        self._machine = [device_identity(), jax.__version__, model.geometry.to_dict(), model.dtype]

    def plan(self, choice: Choice, **sizes: int) -> Plan:
        """The plan of a choice, for the goal's batch and context unless `sizes` say otherwise."""
        budgets = NO_LIMITS if self.goal.dram is None else Budgets(dram=self.goal.dram)
        return plan_of(
            choice,
            self.model.geometry,
            **{"batch": self.goal.batch, "max_context": self.goal.max_context, **sizes},
            dtype=cast(DType, self.model.dtype),
            platform=jax.default_backend(),
            budgets=budgets,
        )

    # ---- what the search asks ----------------------------------------------------------------------------

    def held(self, choice: Choice) -> int:
        """Bytes of memory beside the weights."""
        plan = self.plan(choice)
        return held_bytes(plan, self.model.geometry) - (plan.dram_rows or 0) * plan.dram_row_bytes

    def loss(self, choice: Choice) -> float:
        """Divergence on the calibration text, nats per token."""
        return self.replayed(choice).kl

    def seconds(self, choice: Choice) -> float:
        """Of a step of the goal's batch at its full context."""
        return self.step(choice).total

    def guess(self, choice: Choice, like: Choice) -> float:
        """`seconds`, if misses were in proportion to groups selected, and fewer the more slots and the rarer."""
        known = self.replayed(like)
        scale = _expected_misses(choice) / _expected_misses(like)
        misses = [[n * scale for n in step] for step in known.misses]
        return self._time(self.plan(choice), misses, known.rows).total

    def step(self, choice: Choice, **sizes: int) -> StepTime:
        """What a step takes, by its parts; of other sizes than the goal's if given."""
        known = self.replayed(choice)
        return self._time(self.plan(choice, **sizes), known.misses, known.rows)

    def _time(self, plan: Plan, misses: Sequence[Sequence[float]], rows: int) -> StepTime:
        return step_time(plan, misses, rows, self.graphs, self.disk, self.host_work)

    # ---- tables ------------------------------------------------------------------------------------------

    @cached_property
    def _replay(self) -> Replay:
        prefilled = self.text.prefilled(self.model, self._progress)
        return Replay(self.model, prefilled, self.text.prompts, self.text.following)

    @cached_property
    def _text_digest(self) -> str:
        return self.text.digest

    def replayed(self, choice: Choice) -> Replayed:
        """What the choice loses and reads on the calibration text."""
        context, steps = len(self.text.prompts[0]), len(self.text.following[0])
        plan = self.plan(choice, batch=len(self.text.prompts), max_context=context + steps)
        adapter = self.adapters[choice.group_tokens]
        selection = msgspec.structs.replace(selection_of(plan), load_buckets=(8,))  # which lose nothing
        key = [
            self.model.fingerprint,
            self._text_digest,
            [adapter.text_digest, adapter.tokens, adapter.place_tokens],
            [choice.group_tokens, plan.cache_dtype, selection],
        ]
        found = self._tables.find("replay", key, Replayed)
        if found is None:
            found = self._replay.run(plan, adapter)
            self._tables.keep("replay", key, found)
        return found

    @cached_property
    def graphs(self) -> GraphModel:
        """What a layer's graphs take, from timing them at a few batches and contexts."""
        points: dict[str, list[tuple[Shape, float]]] = {}
        samples = self._samples()
        for done, (name, plan, records) in enumerate(samples):
            points.setdefault(name, []).append(self._timed(name, plan, records))
            if self._progress is not None:
                self._progress("graphs", done + 1, len(samples))
        return GraphModel.fit(points)

    def _samples(self) -> list[tuple[str, Plan, int]]:
        """(graph, a plan that has it, records of a load): enough points for every weight of the model."""
        middle = Choice(group_tokens=4, selected_tokens=256, kept=1.0, rank=32)
        batches = sorted({1, max(1, self.goal.batch // 2), self.goal.batch})
        ends = sorted({1, self.goal.batch})
        most = max(256, min(1024, self.goal.max_context // 2))
        rank = min(128, self._key_size)
        samples = []
        for batch in batches:
            plan = self.plan(middle, batch=batch)
            samples.append(("head", plan, 0))
            for kept in (1.0, most / 256):
                choice = msgspec.structs.replace(middle, kept=kept)
                samples.append(("segment", self.plan(choice, batch=batch), 0))
        for batch in ends:
            for context, r in ((1, min(16, rank)), (1, rank), (2, min(16, rank)), (4, rank)):
                choice = msgspec.structs.replace(middle, rank=r)
                plan = self.plan(choice, batch=batch, max_context=self.goal.max_context // context)
                samples.append(("predict", plan, 0))
        for g in (4, 16):
            choice = msgspec.structs.replace(middle, group_tokens=g, selected_tokens=1024)
            plan = self.plan(choice, batch=max(8, self.goal.batch))
            buckets = selection_of(plan).load_buckets
            samples += [("load", plan, n) for n in (buckets[0], buckets[-1])]
        return samples

    def _timed(self, name: str, plan: Plan, records: int) -> tuple[Shape, float]:
        choice = selection_of(plan)
        shape = Shape(
            batch=plan.batch,
            tokens=choice.reuse_slots * plan.group_tokens,
            places=plan.summary_places,
            rank=choice.rank,
            records=records,
            record_bytes=plan.stride_bytes,
        )
        key = [self._machine, name, plan.cache_dtype, shape]
        seconds = self._tables.find("graphs", key, float)
        if seconds is None:
            for spec in decode_specs(plan, self.model.geometry, [Sampling()]):
                if spec.name == name and (name != "load" or spec.arguments[1].shape[0] == records):
                    seconds = time_graph(spec)
            assert seconds is not None, f"no graph {name} of {records} records"
            self._tables.keep("graphs", key, seconds)
        return shape, seconds

    @cached_property
    def host_work(self) -> HostWork:
        """The host's own work, from a few steps of engines on the calibration text: of a choice that reads much and
        of one that reads little, at a few batches."""
        few, most, rank = min(self.adapters), max(self.adapters), min(64, self._key_size)
        choices = [
            Choice(group_tokens=few, selected_tokens=384, kept=1.5, rank=rank),
            Choice(group_tokens=most, selected_tokens=512, kept=2.0, rank=rank, refresh=2),
        ]
        batches = sorted({1, 2, max(2, self.goal.batch)})
        key = [self._machine, self._text_digest, self.plan(choices[0]).cache_dtype, choices, batches]
        found = self._tables.find("host", key, HostWork)
        if found is None:
            curve, _ = ensure_disk_curve(self.store_dir, self._progress)
            timed = [self.run_engine(choice, batch) for choice in choices for batch in batches]
            found = fit_host_work(timed, self.graphs, curve)
            self._tables.keep("host", key, found)
        return found

    def run_engine(
        self, choice: Choice, batch: int, *, text: Text | None = None, syscalls: Syscalls | None = None
    ) -> tuple[Plan, Steps]:
        """Decode steps of a real engine, whose rows are those of the calibration text, or of `text`, in turn."""
        text = text or self.text
        rows = [row % len(text.prompts) for row in range(batch)]
        prompts = [text.prompts[row] for row in rows]
        following = [text.following[row] for row in rows]
        plan = self.plan(choice, batch=batch, max_context=len(prompts[0]) + len(following[0]))
        prefilled = text.prefilled(self.model, self._progress).select(rows)
        adapter = self.adapters[choice.group_tokens]
        steps = run_steps(self.model, plan, adapter, prefilled, prompts, following, self.store_dir, syscalls)
        return plan, steps

    @property
    def _key_size(self) -> int:
        return self.model.geometry.kv_heads * self.model.geometry.head_dim


def _expected_misses(choice: Choice) -> float:
    """Up to a factor that depends on the model and the text."""
    return choice.selected_tokens / choice.group_tokens / choice.kept / choice.refresh


def tune(tuner: Tuner, space: Space, told: Told | None = None) -> Found:
    """The fastest choice of the space within the goal's bounds.

    Raises:
      PlanError: there is none; it says what the smallest needs, or the least that is lost.
    """
    sizes = tuple(g for g in space.group_tokens if g in tuner.adapters)
    space = replace(space, group_tokens=sizes).limited(tuner.model.geometry, tuner.goal.max_context)
    return search(space, tuner, memory=tuner.goal.memory, loss=tuner.goal.loss, progress=told)
