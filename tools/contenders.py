"""What takes part in a benchmark: each prefills once, then steps. Here: our engine under one plan."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
from scan import scan_seconds
from step_profile import profile_steps

from swapkv_jax import Engine, Plan
from swapkv_jax.accounting import kv_bytes
from swapkv_jax.adapter import Adapter
from swapkv_jax.cache import CacheUse
from swapkv_jax.disk_reads import random_read_rate
from swapkv_jax.group_graphs import selection_of
from swapkv_jax.models import Model
from swapkv_jax.prefilled import Prefilled, Prompts
from swapkv_jax.tiers import Syscalls, sequential_read_rate
from swapkv_jax.tiers.direct_io import PAGE
from swapkv_jax.tiers.throttled import StorageProfile, ThrottledDisk

# Counters of `CacheUse` that a step adds to.
COUNTERS = (
    "bytes_read", "reads", "wait_s", "read_s", "groups_selected", "groups_read", "groups_from_dram", "overflow_loads",
)  # fmt: skip
RANDOM_READS, RANDOM_DEPTH = 2048, 64  # of one turn
QUIET_POLLS = 4  # of 20 ms each without a byte: then reading ahead has come to rest


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What all contenders decode: `new_tokens` after `prompts`, the given ones where there are `following`."""

    prompts: Prompts
    new_tokens: int
    following: Sequence[Sequence[int]] | None = None
    prefilled: Prefilled | None = None


@dataclass
class Samples:
    """What was measured, one entry per turn of `steps` steps. Only `seconds` (per step) has entries of peers.

    `during` counts what happened while the turn was timed; `whole` also what was read ahead until the next one.
    `reader_rate` is what another reader of the same files got right after, in bytes/s: a sequential one under
    `layer`, one of random records under `group`.
    """

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    during: list[dict[str, float]] = field(default_factory=list)
    whole: list[dict[str, float]] = field(default_factory=list)
    reader_rate: list[float] = field(default_factory=list)

    def total(self, counter: str) -> float:
        """A counter over all turns."""
        return sum(counts[counter] for counts in self.whole)


class Contender(Protocol):
    @property
    def label(self) -> str: ...

    @property
    def policy(self) -> str | None:
        """Of our engine's plan; None of a peer."""
        ...

    def prefill(self, work: Workload) -> float | None:
        """Seconds to the first token, None where the prefill was not computed here."""
        ...

    def measure(self, samples: Samples, steps: int) -> None:
        """As many steps one after the other, timed into `samples`."""
        ...

    def breakdown(self, steps: int) -> dict[str, Any] | None:
        """Where `steps` more steps went, see `step_profile`; None where that cannot be told."""
        ...

    @property
    def tokens(self) -> list[list[int]]:
        """Tokens of every row, per step."""
        ...

    def describe(self) -> dict[str, Any]:
        """The keys of the row that say what this is and what it holds."""
        ...

    def close(self) -> None: ...


class OurEngine:
    """An engine of this package. Tier `disk` gets a directory of its own, removed at the end."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        store_dir: Path,
        adapter: Adapter | None = None,
        profile: StorageProfile | None = None,
        name: str | None = None,
    ):
        """`name`: what it is called, if not by its plan's policy."""
        self._name = name or plan.policy
        self._plan, self._geometry = plan, model.geometry
        self._syscalls = Syscalls() if profile is None else ThrottledDisk(profile)
        self._store = Path(tempfile.mkdtemp(prefix="benchmark-", dir=store_dir))
        try:
            self._engine = Engine(
                model, plan, store_dir=self._store, adapter=adapter, syscalls=self._syscalls
            )
        except BaseException:
            shutil.rmtree(self._store)
            raise
        self.tokens: list[list[int]] = []
        self._settled: CacheUse | None = None  # at the end of the turn before

    @property
    def label(self) -> str:
        return self._name if self._plan.tier is None else f"{self._name} {self._plan.tier}"

    @property
    def policy(self) -> str:
        return self._plan.policy

    @property
    def reads_disk(self) -> bool:
        return self._plan.tier == "disk"

    def prefill(self, work: Workload) -> float | None:
        self._generation = self._engine.generate(
            work.prompts,
            max_new_tokens=work.new_tokens,
            ignore_eos=True,
            forced=work.following,
            prefilled=work.prefilled,
        )
        self._step()
        return self._generation.ttft_s if work.prefilled is None else None

    def _step(self) -> None:
        self.tokens.append([token for token in next(self._generation).tokens if token is not None])

    def measure(self, samples: Samples, steps: int) -> None:
        before = self._engine.use
        started = time.perf_counter()
        for _ in range(steps):
            self._step()
        seconds = time.perf_counter() - started
        samples.steps.append(steps)
        samples.seconds.append(seconds / steps)
        samples.during.append(_between(before, self._engine.use))
        settled = self._settle()
        samples.whole.append(_between(self._settled or before, settled))
        self._settled = settled
        if self.reads_disk:
            samples.reader_rate.append(self._reader_rate())

    def _settle(self) -> CacheUse:
        """What has been used, once reading ahead has come to rest: it fills its staging slots between turns."""
        use, quiet = self._engine.use, 0
        while self._plan.tier is not None and quiet < QUIET_POLLS:
            time.sleep(0.02)
            last, use = use, self._engine.use
            moved = _between(last, use)
            quiet = 0 if moved["bytes_read"] or moved["read_s"] else quiet + 1
        return use

    def _reader_rate(self) -> float:
        """Bytes/s of another reader of this engine's own files, past the page cache."""
        sizes = {path: path.stat().st_size for path in self._store.glob("*.kv")}
        if self._plan.policy == "group":
            return random_read_rate(
                list(sizes),
                record_bytes=self._plan.stride_bytes,
                alignment=self._plan.record_alignment,
                reads=RANDOM_READS,
                depth=RANDOM_DEPTH,
                syscalls=self._syscalls,
            )
        seconds = 0.0
        for path, size in sizes.items():
            chunk = min(1 << 20, size // PAGE * PAGE)
            seconds += size / sequential_read_rate(path, chunk_bytes=chunk, syscalls=self._syscalls) / 1e6
        return sum(sizes.values()) / seconds

    def breakdown(self, steps: int) -> dict[str, Any]:
        before = self._engine.use.wait_s
        profile = profile_steps(self._step, steps)
        return profile.split(self._engine.use.wait_s - before)

    def describe(self) -> dict[str, Any]:
        plan, use = self._plan, self._engine.use
        held = kv_bytes(plan, self._geometry)
        is_group = plan.policy == "group"
        kv_size = plan.kv_heads * plan.head_dim * plan.group_tokens * plan.itemsize
        return {
            "name": self._name,
            "policy": plan.policy,
            "selection": None if plan.selection is None else msgspec.to_builtins(plan.selection),
            "tier": plan.tier,
            "kv_dtype": plan.cache_dtype,
            "plan": plan.hash,
            "physical_layers": plan.physical_layers,
            "kv_bytes": held,
            "memory_fraction": (held["device"] + held["dram"]) / plan.full_kv_bytes,
            "record_bytes": plan.payload_bytes if is_group else None,
            "group_bytes": 2 * kv_size if is_group else None,
            "attended_groups": _attended_groups(plan) if is_group else None,
            "summary_scans": _summary_scans(plan) if is_group else None,
            "summary_bytes": use.summary_bytes if is_group else None,
            "scan_s": scan_seconds(self._engine) if is_group else None,
            "compiles_during_decode": self._generation.compiles_during_decode,
            "notes": list(use.notes),
        }

    def close(self) -> None:
        self._engine.close()
        shutil.rmtree(self._store, ignore_errors=True)


def _attended_groups(plan: Plan) -> int:
    """Groups that all layers and rows attend in a step at full context, whatever was selected anew."""
    choice = selection_of(plan)
    kept = choice.reuse_slots if choice.attended == "kept" else choice.selected_groups
    each = (plan.groups if layer in choice.whole else kept for layer in range(plan.layers))
    return plan.batch * sum(min(groups, plan.groups) for groups in each)


def _summary_scans(plan: Plan) -> float:
    """How much of the summary a step reads, on average."""
    return selection_of(plan).selections_per_step(plan.layers) / len(plan.selecting_layers)


def _between(before: CacheUse, after: CacheUse) -> dict[str, float]:
    return {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
