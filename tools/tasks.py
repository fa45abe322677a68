"""What every task of `evaluate.py` needs: plans made to fit it, prefill, decoding, and parts that are kept."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from adapters import Adapters, adapter_of
from parts import Key, Parts

from swapkv_jax import Engine, Plan, PlanError
from swapkv_jax.accounting import kv_bytes
from swapkv_jax.capture import CapturedPrefill, capture
from swapkv_jax.generation import Step
from swapkv_jax.models import Model, Progress
from swapkv_jax.strategies.adapters import plan_adapter


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every task needs.

    Attributes:
      plans: by name; `fit` gives them the task's batch and context.
      resize: what to do with a plan, given by name too, once it has them.
      batch: rows decoded together.
      capture_dir: where prefills are kept; None: with the unfinished `parts`, else in a directory of `store_dir` that
        is removed.
      parts: where finished parts are kept.
    """

    model: Model
    adapters: Adapters
    plans: Mapping[str, Plan]
    reference: Plan
    batch: int
    store_dir: Path
    capture_dir: Path | None
    progress: Progress
    resize: Callable[[str, Plan], Plan] | None = None
    parts: Parts | None = None
    _digests: dict[tuple[str, int], str | None] = field(default_factory=dict, repr=False)

    def fit(self, plan: Plan, max_context: int, rows: int) -> Plan:
        """The plan for this task: `batch` rows of `max_context` tokens. PlanError if that does not work."""
        plan = msgspec.structs.replace(plan, batch=min(self.batch, rows), max_context=max_context)
        plan.validate(self.model.geometry)
        return plan

    def fit_all(self, max_context: int, rows: int) -> tuple[dict[str, Plan], dict[str, PlanError]]:
        """The plans by name for this task, resized, and why those are not among them that cannot be.

        Raises:
          PlanError: one of them does not work, whatever its size.
        """
        fitting, unfit = {}, {}
        for name, plan in self.plans.items():
            fitted = self.fit(plan, max_context, rows)
            if self.resize is not None:
                try:
                    fitted = self.resize(name, fitted)
                except PlanError as error:
                    unfit[name] = error
                    continue
                fitted.validate(self.model.geometry)
            fitting[name] = fitted
        return fitting, unfit

    @contextlib.contextmanager
    def captured(
        self, prompts: Sequence[Sequence[int]], like: Plan
    ) -> Iterator[Callable[[], CapturedPrefill]]:
        """What gives the prompts' prefill, computed as by `like` when it is first asked for, and removed at the end
        unless it is to be kept."""
        with contextlib.ExitStack() as stack:
            if self.capture_dir is not None:
                place = self.capture_dir
            elif self.parts is not None:
                place = stack.enter_context(self.parts.prefills(like))
            else:
                place = Path(stack.enter_context(self.scratch()))

            @functools.cache
            def prefill() -> CapturedPrefill:
                return capture(self.model, prompts, place, like=like, progress=self.progress)

            yield prefill

    def key(self, task: str, plan: Plan, **inputs: Any) -> Key:
        """What a part of `task` depends on: the model, a plan, and the task's own `inputs`."""
        if self.parts is None:
            return {}  # which nothing is looked up by
        return {
            "task": task,
            "model": self.model.fingerprint,
            "plan": plan.hash,
            "directions": self._directions(plan),
            **inputs,
        }

    def _directions(self, plan: Plan) -> str | None:
        """Digest of the adapter's vectors that a plan selects by, None where it has none."""
        if plan.selection is None:
            return None
        place = plan.selection.strategy_name, plan.place_tokens
        if place not in self._digests:
            adapter = adapter_of(self.adapters, plan)
            if adapter is None:
                adapter, _ = plan_adapter(self.model, plan)
            self._digests[place] = (
                None if adapter is None else xxhash.xxh3_128_hexdigest(adapter.vectors.tobytes())
            )
        return self._digests[place]

    def part(self, key: Key, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A part of the evaluation, taken from those that are kept if it is there."""
        return compute() if self.parts is None else self.parts.part(key, compute)

    def is_kept(self, key: Key) -> bool:
        return self.parts is not None and self.parts.find(key) is not None

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="evaluate-", dir=self.store_dir)


def decode(
    bench: Bench,
    name: str,
    plan: Plan,
    captured: CapturedPrefill,
    prompts: Sequence[list[int]],
    new_tokens: int,
    *,
    forced: Sequence[list[int]] | None = None,
    use: dict[str, Any] | None = None,
) -> Iterator[tuple[list[int], int, Step]]:
    """Decodes all prompts from their captured prefill, as many at a time as the plan has rows.

    Yields which prompts a step belongs to, its number and the step, whose rows beyond those prompts fill up the
    batch and count for nothing. `use` gets what the engine's cache has to say at the end.
    """
    rows, every = plan.batch, range(len(prompts))
    total = -(-len(prompts) // rows) * new_tokens
    with (
        bench.scratch() as store,
        Engine(bench.model, plan, store_dir=Path(store), adapter=adapter_of(bench.adapters, plan)) as engine,
    ):
        for first in range(0, len(prompts), rows):
            real = list(every[first : first + rows])
            batch = real + [real[-1]] * (rows - len(real))
            generation = engine.generate(
                [prompts[row] for row in batch],
                max_new_tokens=new_tokens,
                ignore_eos=forced is not None,
                return_logits=forced is not None,
                forced=None if forced is None else [forced[row] for row in batch],
                prefilled=captured.select(batch),
            )
            for number, step in enumerate(generation):
                yield real, number, step
                bench.progress(name, first // rows * new_tokens + number + 1, total)
        if use is not None:
            use["reuse_rate"] = engine.use.reuse_rate


def describe(plan: Plan, model: Model) -> dict[str, Any]:
    """A plan, and the memory its keys and values take while it decodes."""
    held = kv_bytes(plan, model.geometry)
    return {
        "policy": plan.policy,
        "strategy": None if plan.selection is None else plan.selection.strategy_name,
        "hash": plan.hash,
        "plan": msgspec.to_builtins(plan),
        "kv_bytes": held,
        "full_kv_bytes": plan.full_kv_bytes,
        "memory_fraction": (held["device"] + held["dram"]) / plan.full_kv_bytes,
    }


def token_digest(rows: Sequence[Sequence[int]]) -> str:
    """Of token ids, row by row."""
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(np.asarray([len(row), *row], "<i4").tobytes())
    return digest.hexdigest()
