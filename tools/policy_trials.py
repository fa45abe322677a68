"""Settings of policies tried in the engine itself: what each loses, and how long its steps take.

The tuner's replay is of low-rank group means alone: it has no summary of single tokens, no bounds of groups, and no
keys made of factors. So every setting gets an engine, which decodes the calibration text token by token from a
prefill that is computed once, and one run gives both its loss and its time.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from equal_memory import memory_fraction
from jax.experimental.compilation_cache import compilation_cache
from msgspec import structs
from policy_space import FEATURES, Setting, Space
from settings_file import Trial

from swapkv_jax import Engine, Plan, UsageError, make_plan
from swapkv_jax.adapter import Adapter
from swapkv_jax.cache import CacheUse
from swapkv_jax.cgroups import usable_cores
from swapkv_jax.group_graphs import selection_of
from swapkv_jax.models import DTYPES, Model
from swapkv_jax.plan import DType
from swapkv_jax.quality import divergence
from swapkv_jax.rates import device_identity
from swapkv_jax.staging import compute_capability
from swapkv_jax.strategies.adapters import plan_adapter
from swapkv_jax.talk import Progress
from swapkv_jax.tiers import Syscalls
from swapkv_jax.tiers.throttled import StorageProfile, ThrottledDisk
from swapkv_jax.tuner.host_work import WARM_UP
from swapkv_jax.tuner.tables import Tables
from swapkv_jax.tuner.timing import QUIET
from swapkv_jax.tuner.trend import Trend
from swapkv_jax.tuner.tune import Text

# What is expected of `Space.features` before anything is measured: of the log of the loss, and of the time.
_LOSS = (-0.4, -0.25, 0.1, -0.1, -0.1, -0.05, -0.05, -0.05, 0.05, 0.1)
_SECONDS = (0.1, 0.02, -0.05, 0.15, 0.0, 0.0, 0.0, 0.03, 0.0, -0.15)
_SPREAD, _NOISE = 0.25, 0.1
_LEAST = 1e-9  # nats: nothing lost at all has no logarithm


_COMPILED: dict[str, Any] = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


@contextlib.contextmanager
def compiled_once(directory: Path) -> Iterator[None]:
    """Within the block compiled graphs are kept in `directory`, and taken from there: trials of a policy differ in a
    few graphs alone, and compiling takes longer than all else of a trial."""
    settings = {**_COMPILED, "jax_compilation_cache_dir": str(directory)}
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all trials have in common.

    Attributes:
      text: whose rows are decoded `batch` at a time. store_dir: where engines keep KV while they run.
      profile: the disk that they read as if from, None for the one there is.
      tables: where trials are kept. timed: whether times count; beside other work they are of no use.
    """

    model: Model
    text: Text
    batch: int
    store_dir: Path
    profile: StorageProfile | None
    tables: Tables
    timed: bool = True
    progress: Progress | None = None
    _adapters: dict[tuple[str, int], Adapter | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps <= WARM_UP:
            raise UsageError(
                f"{self.steps} tokens are too few to time a step, whose first {WARM_UP} do not count; give --tokens "
                f"of at least {WARM_UP + 1}"
            )
        if len(self.text.prompts) % self.batch:
            raise UsageError(
                f"{len(self.text.prompts)} rows cannot be decoded {self.batch} at a time; give --rows that are a "
                "multiple of --batch"
            )

    @property
    def steps(self) -> int:
        """Tokens of a row that are compared: the first is prefill's, which all have in common."""
        return len(self.text.following[0]) - 1

    @property
    def max_context(self) -> int:
        """Tokens that a row comes to."""
        return len(self.text.prompts[0]) + len(self.text.following[0])

    @property
    def itemsize(self) -> int:
        """Bytes of one number of a key or value."""
        return DTYPES[self.model.dtype].itemsize

    @property
    def request(self) -> dict[str, Any]:
        """What every plan is asked for."""
        return {
            "batch": self.batch,
            "max_context": self.max_context,
            "dtype": self.model.dtype,
            "platform": jax.default_backend(),
            "capability": compute_capability(),
        }

    @property
    def machine(self) -> str:
        """What the times are true of, but for the host's name."""
        device = jax.devices()[0]
        return f"{device.platform} {device.device_kind}, {usable_cores()} cores, jax {jax.__version__}"

    def trial(self, plan: Plan) -> Trial:
        """What a plan of policy `group` does, now or when it was tried before."""
        adapter = self._adapter(plan)
        calibrated = None if adapter is None else [adapter.text_digest, adapter.tokens, adapter.place_tokens]
        loses = [self.model.fingerprint, self._digest, self.batch, plan, calibrated]
        takes = [
            device_identity(),
            jax.__version__,
            None if self.profile is None else self.profile.name,
            *loses,
        ]
        found = self.tables.find("losses", loses, Trial)
        seconds = self.tables.find("times", takes, float) if self.timed else None
        if found is None or (self.timed and seconds is None):
            found, seconds = self._tried(plan, adapter)
            self.tables.keep("losses", loses, found)
            if self.timed:
                self.tables.keep("times", takes, seconds)
        return structs.replace(found, seconds=seconds if self.timed else None)

    def _adapter(self, plan: Plan) -> Adapter | None:
        name = selection_of(plan).strategy_name, plan.place_tokens
        if name not in self._adapters:
            self._adapters[name], _ = plan_adapter(self.model, plan, progress=self.progress)
        return self._adapters[name]

    @cached_property
    def _digest(self) -> str:
        return self.text.digest

    def _tried(self, plan: Plan, adapter: Adapter | None) -> tuple[Trial, float]:
        """What a plan loses, and the seconds of its step."""
        logits, seconds, read = self._decode(plan, adapter)
        kl = divergence(self._reference, logits)
        warm = [row[WARM_UP:] for row in seconds]
        trial = Trial(
            kl=float(kl.mean()),
            top1=float((self._reference.argmax(-1) == logits.argmax(-1)).mean()),
            seconds=None,
            read_bytes=read.bytes,
            reuse=read.reuse,
            memory=memory_fraction(plan, self.model.geometry),
            selected_groups=selection_of(plan).selected_groups,
            reuse_slots=selection_of(plan).reuse_slots,
            plan=plan.hash,
        )
        return trial, float(np.percentile(warm, QUIET))

    @cached_property
    def _reference(self) -> np.ndarray:
        """Logits of `resident`."""
        plan = make_plan(
            self.model.geometry,
            cache="resident",
            batch=self.batch,
            max_context=self.max_context,
            dtype=cast(DType, self.model.dtype),
            platform=jax.default_backend(),
        )
        return self._decode(plan, None)[0]

    def _decode(self, plan: Plan, adapter: Adapter | None) -> tuple[np.ndarray, list[list[float]], _Reads]:
        """Logits [rows, tokens, V] of the text's own tokens, seconds of every step by batch, and what was read."""
        prompts, following = self.text.prompts, self.text.following
        prefilled = self.text.prefilled(self.model, self.progress)
        syscalls = Syscalls() if self.profile is None else ThrottledDisk(self.profile)
        logits, seconds, reads = [], [], _Reads()
        with (
            tempfile.TemporaryDirectory(prefix="search-", dir=self.store_dir) as store,
            Engine(
                self.model, plan, store_dir=Path(store), adapter=adapter, syscalls=syscalls, ephemeral=True
            ) as engine,
        ):
            for first in range(0, len(prompts), self.batch):
                rows = range(first, first + self.batch)
                generation = engine.generate(
                    [prompts[row] for row in rows],
                    max_new_tokens=self.steps + 1,
                    ignore_eos=True,
                    return_logits=True,
                    forced=[following[row] for row in rows],
                    prefilled=prefilled.select(rows),
                )
                # Nothing is computed between steps, in which reads could go on without costing time.
                kept = [next(generation).logits for _ in range(WARM_UP + 1)]
                before = engine.use
                kept += [step.logits for step in generation]
                logits.append(np.stack(cast(list[np.ndarray], kept[1:]), axis=1))
                seconds.append(generation.step_s)
                reads.add(before, engine.use, self.steps - WARM_UP)
        return np.concatenate(logits), seconds, reads


class Trials:
    """One policy's settings, for the search: measured by a bench, guessed by how those that were measured fared."""

    def __init__(self, bench: Bench, space: Space):
        self._bench, self._space = bench, space
        assert len(_LOSS) == len(_SECONDS) == FEATURES
        self._loss = Trend(_LOSS, spread=_SPREAD, noise=_NOISE)
        self._seconds = Trend(_SECONDS, spread=_SPREAD, noise=_NOISE)
        self.found: dict[Setting, Trial] = {}

    def trial(self, setting: Setting) -> Trial:
        """What the setting does."""
        if setting not in self.found:
            trial = self._bench.trial(self._space.plan(setting))
            features = self._space.features(setting)
            self._loss.learn(features, max(trial.kl, _LEAST))
            if trial.seconds is not None:
                self._seconds.learn(features, trial.seconds)
            self.found[setting] = trial
        return self.found[setting]

    def loss(self, setting: Setting) -> float:
        """Nats per token."""
        return self.trial(setting).kl

    def seconds(self, setting: Setting) -> float:
        """Of a step; 0 where times do not count."""
        return self.trial(setting).seconds or 0.0

    def guess_loss(self, setting: Setting, like: Setting) -> float:
        """The least that a setting may lose, by one like it."""
        features = self._space.features
        return self._loss.guess(features(setting), features(like), max(self.loss(like), _LEAST))

    def guess_seconds(self, setting: Setting, like: Setting) -> float:
        """The least that its step may take."""
        features = self._space.features
        return self._seconds.guess(features(setting), features(like), self.seconds(like))


class _Reads:
    """Reads of steps, added up over batches."""

    def __init__(self) -> None:
        self._bytes, self._groups, self._selected, self._steps = 0, 0, 0, 0

    def add(self, before: CacheUse, after: CacheUse, steps: int) -> None:
        self._bytes += after.bytes_read - before.bytes_read
        self._groups += after.groups_read - before.groups_read
        self._selected += after.groups_selected - before.groups_selected
        self._steps += steps

    @property
    def bytes(self) -> float:
        """Per step."""
        return self._bytes / self._steps

    @property
    def reuse(self) -> float:
        """Of what was selected, the share that was there."""
        return 1 - self._groups / self._selected if self._selected else 1.0
