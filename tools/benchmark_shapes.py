"""What a benchmark measures at one context and batch: under each storage profile, everything that decodes."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from adapters import Adapters, adapter_of
from benchmark_flags import OWN
from contenders import Contender, OurEngine, Workload
from kept_runs import KeptRuns, content_digest
from peer_decode import Chosen, choose_settings, open_setting
from peers import Peer, Setting
from policies import given_by_policy, policy_plan
from rounds import Steps, interleave
from windows import cut_windows

from swapkv_jax import Plan
from swapkv_jax.capture import capture
from swapkv_jax.models import Model
from swapkv_jax.prefilled import Prefilled, RandomPrefill
from swapkv_jax.rates import memory_bandwidth
from swapkv_jax.staging import compute_capability
from swapkv_jax.talk import Talk
from swapkv_jax.tiers.throttled import storage_profile

TRIAL_STEPS, TRIAL_BURST = 6, 2  # of each setting of a peer
Tokens = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all shapes have in common. `prefill`: real, once or random."""

    args: argparse.Namespace
    model: Model
    adapters: Adapters
    peers: Mapping[str, Peer]
    prefill: str
    store_dir: Path
    say: Talk

    def common(self) -> dict[str, Any]:
        """What its measurements depend on."""
        args = self.args
        return {
            "model": self.model.fingerprint,
            "adapters": {name: content_digest(a.vectors.tobytes()) for name, a in self.adapters.items()},
            "peers": {name: peer.version for name, peer in self.peers.items()},
            "prefill": self.prefill,
            "store": str(self.store_dir),
            "steps": asdict(steps_of(args)),
        }


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One context and batch: the plans to measure with their policies' names, the prompts, and what follows them in
    their texts, if they are of texts."""

    plans: list[tuple[str, Plan]]
    prompts: Tokens
    following: Tokens | None

    def key(self) -> dict[str, Any]:
        return {
            "plans": [(name, msgspec.to_builtins(plan)) for name, plan in self.plans],
            "tokens": content_digest([self.prompts, self.following]),
        }


def steps_of(args: argparse.Namespace) -> Steps:
    """The steps that the flags ask of each contender."""
    return Steps(timed=args.steps, burst=args.burst, warm_up=args.warm_up, breakdown=args.breakdown)


def make_shape(
    args: argparse.Namespace, model: Model, texts: Mapping[str, str] | None, context: int, batch: int
) -> Shape:
    """Raises UsageError or PlanError: flags that cannot work for it."""
    new = steps_of(args).new_tokens
    plans = list(_plans(args, model, batch, context + new))
    if texts is None:
        vocab = model.geometry.vocab
        random = np.random.default_rng(0).integers(0, vocab, (batch, context)).tolist()
        return Shape(plans=plans, prompts=random, following=None)
    lower = "--context, --batch or --steps"
    windows = cut_windows(model, texts, batch, context, new - 1, lower=lower)
    return Shape(plans=plans, prompts=[w.prompt for w in windows], following=[w.following for w in windows])


def _plans(
    args: argparse.Namespace, model: Model, batch: int, max_context: int
) -> Iterator[tuple[str, Plan]]:
    tiers = {"resident": ("auto",), "layer": args.tier, "flexgen": ("disk",)}
    given = given_by_policy(args, args.kv_memory)
    for policy in args.policies:
        own = {"physical_layers": args.physical_layers} if policy in ("layer", "flexgen") else {}
        for tier in tiers.get(policy, args.group_tier):
            yield (
                policy,
                policy_plan(
                    model.geometry,
                    policy,
                    given.get(policy, {}),
                    tier=tier,
                    memory=args.kv_memory,
                    batch=batch,
                    max_context=max_context,
                    dtype=args.dtype,
                    platform=jax.default_backend(),
                    capability=compute_capability(),
                    **own,
                ),
            )


@dataclass(frozen=True)
class Measured:
    """Rows of one shape, of the trials of peers' settings before them, and why settings were skipped.
    `memory_bytes_per_s` is the best that was seen of the memory meanwhile."""

    rows: list[dict[str, Any]]
    trials: list[dict[str, Any]]
    skipped: dict[str, str]
    memory_bytes_per_s: float


def measure_shape(setup: Setup, shape: Shape, kept: KeptRuns) -> Measured:
    """Measures under every storage profile what `kept` does not have."""
    with ExitStack() as stack:
        work = _Work(setup, shape, stack)
        chosen = _chosen(setup, shape, work, kept)
        rows, bandwidth = [], 0.0
        for profile in setup.args.storage_profile:
            key = {**shape.key(), "profile": profile, "peers": [s.name for _, s in chosen.settings]}
            found = kept.get("shapes", key, lambda name=profile: _measure(setup, shape, work, chosen, name))
            rows += found["rows"]
            bandwidth = max(bandwidth, found["memory_bytes_per_s"])
    return Measured(rows, chosen.trials, chosen.skipped, bandwidth)


class _Work:
    """The workload of a shape, whose prefill is computed when it is first needed, and goes when `stack` closes."""

    def __init__(self, setup: Setup, shape: Shape, stack: ExitStack):
        self._setup, self._shape, self._stack = setup, shape, stack
        self.prefill_s: float | None = None

    @cached_property
    def load(self) -> Workload:
        args = self._setup.args
        return Workload(
            prompts=self._shape.prompts,
            new_tokens=steps_of(args).new_tokens,
            following=self._shape.following,
            prefilled=self._prefilled(),
        )

    def _prefilled(self) -> Prefilled | None:
        setup, prompts = self._setup, self._shape.prompts
        if setup.prefill == "random":
            return RandomPrefill(setup.model, prompts)
        if setup.prefill == "real":
            return None
        place = setup.args.capture_dir
        if place is None:
            scratch = tempfile.TemporaryDirectory(prefix="benchmark-prefill-", dir=setup.store_dir)
            place = Path(self._stack.enter_context(scratch))
        started, before = time.perf_counter(), set(place.glob("*.npy")) if place.is_dir() else set()
        with setup.say.bars() as progress:
            found = capture(setup.model, prompts, place, progress=progress)
        if not before.intersection(place.glob("*.npy")):
            self.prefill_s = time.perf_counter() - started
        return found


def _chosen(setup: Setup, shape: Shape, work: _Work, kept: KeptRuns) -> Chosen:
    """The peers' settings that take part."""
    if not setup.peers:
        return Chosen([], [], {})

    def tried() -> dict[str, Any]:
        found = choose_settings(
            setup.peers,
            len(shape.prompts),
            shape.plans[0][1].max_context,
            work.load,
            Steps(timed=min(TRIAL_STEPS, setup.args.steps), burst=min(TRIAL_BURST, setup.args.burst)),
            dtype=setup.model.dtype,
        )
        settings = [(name, setting.name) for name, setting in found.settings]
        return {"settings": settings, "trials": _shaped(shape, found.trials), "skipped": found.skipped}

    known = kept.get("trials", shape.key(), tried)
    settings = [(name, _named(setup.peers[name].settings, setting)) for name, setting in known["settings"]]
    return Chosen(settings, known["trials"], known["skipped"])


def _named(settings: Sequence[Setting], name: str) -> Setting:
    return next(setting for setting in settings if setting.name == name)


def _measure(setup: Setup, shape: Shape, work: _Work, chosen: Chosen, profile: str) -> dict[str, Any]:
    """The rows under one storage profile."""
    args, batch = setup.args, len(shape.prompts)
    slower = None if profile == OWN else storage_profile(profile)
    load = work.load
    with ExitStack() as stack:
        contenders: list[Contender] = []
        for policy, plan in shape.plans:
            adapter = adapter_of(setup.adapters, plan)
            contenders.append(OurEngine(setup.model, plan, setup.store_dir, adapter, slower, policy))
            stack.callback(contenders[-1].close)
        for name, setting in chosen.settings:
            capacity = shape.plans[0][1].max_context
            contenders.append(open_setting(name, setup.peers[name], setting, batch, capacity))
            stack.callback(contenders[-1].close)
        rows = interleave(contenders, load, steps_of(args))
    more = {"storage_profile": profile, "prefill_s": work.prefill_s}
    # What the memory can do shows only when nobody else uses it: the best moment counts.
    return {"rows": _shaped(shape, rows, **more), "memory_bytes_per_s": memory_bandwidth()}


def _shaped(shape: Shape, rows: Sequence[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    plan = shape.plans[0][1]
    named = {"context": len(shape.prompts[0]), "batch": plan.batch, "full_kv_bytes": plan.full_kv_bytes}
    return [{**named, **more, **row} for row in rows]
