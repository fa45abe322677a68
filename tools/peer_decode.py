"""A peer that takes part in a benchmark, and which of its settings is worth it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from contenders import Samples, Workload
from peers import Peer, PeerRun, PeerUnavailable, Setting
from rounds import Steps, interleave

from swapkv_jax.prefilled import RandomPrefill


class PeerDecode:
    """A `Contender`: a peer's decode under one setting, timed as ours is. It starts from the same prefill."""

    policy = None

    def __init__(self, peer: str, version: str, setting: Setting, run: PeerRun):
        self.label = f"{peer} {setting.name}"
        self._peer, self._version, self._setting, self._run = peer, version, setting, run
        self._following: Sequence[Sequence[int]] | None = None
        self.tokens: list[list[int]] = []

    def prefill(self, work: Workload) -> float | None:
        self._following = work.following
        started = time.perf_counter()
        if work.prefilled is None:
            self._took(self._run.prefill(work.prompts))
            return time.perf_counter() - started
        length = len(work.prompts[0])
        if isinstance(work.prefilled, RandomPrefill):
            self._run.take(work.prefilled, length)
            self._took(
                [0] * len(work.prompts)
            )  # as our engines: of hidden states of zero, no token is likelier
        else:
            self._run.take(work.prefilled, length - 1)
            self._took(self._run.step([prompt[-1] for prompt in work.prompts]))
        return None

    def _took(self, chosen: list[int]) -> None:
        if self._following is not None:
            chosen = [row[len(self.tokens)] for row in self._following]
        self.tokens.append(chosen)

    def measure(self, samples: Samples, steps: int) -> None:
        started = time.perf_counter()
        for _ in range(steps):
            self._took(self._run.step(self.tokens[-1]))
        samples.steps.append(steps)
        samples.seconds.append((time.perf_counter() - started) / steps)

    def breakdown(self, steps: int) -> None:
        return None  # what a peer's step consists of is not known here

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.label,
            "peer": self._peer,
            "setting": self._setting.name,
            "precision": self._setting.precision,
            "kv_dtype": self._setting.kv_dtype,
            "weight_bytes": self._setting.weight_bytes,
            "token_bytes": self._setting.token_bytes,
            "kv_bytes": {"device": self._run.kv_bytes, "dram": 0, "disk": 0},
            "notes": [self._version],
        }

    def close(self) -> None:
        self._run.close()


@dataclass(frozen=True)
class Chosen:
    """The settings of all peers that take part in the rounds, a row per setting that was tried, and what was skipped:
    why, by peer and setting."""

    settings: list[tuple[str, Setting]]
    trials: list[dict[str, Any]]
    skipped: dict[str, str]


def choose_settings(
    peers: Mapping[str, Peer],
    batch: int,
    capacity: int,
    work: Workload,
    steps: Steps,
    *,
    dtype: str,
) -> Chosen:
    """Tries every setting of each peer, those of one peer in interleaved rounds, and takes the
    fastest one whose precision is `dtype`, ours, and the fastest of the others. (All of them at once would need
    memory for as many whole caches.)"""
    found = Chosen([], [], {})
    for name, peer in peers.items():
        found.skipped.update(
            {f"{name} {setting}": f"skipped ({why})" for setting, why in peer.skipped.items()}
        )
        with ExitStack() as stack:
            tried: list[tuple[Setting, PeerDecode]] = []
            for setting in peer.settings:
                try:
                    run = open_setting(name, peer, setting, batch, capacity)
                except PeerUnavailable as reason:
                    found.skipped[f"{name} {setting.name}"] = f"skipped ({reason})"
                    continue
                stack.callback(run.close)
                tried.append((setting, run))
            if not tried:
                continue
            try:
                rows = interleave([run for _, run in tried], work, steps, what="trials, ")
            except PeerUnavailable as reason:
                found.skipped[name] = f"skipped ({reason})"
                continue
        fastest: dict[bool, tuple[float, Setting]] = {}
        for (setting, _), row in zip(tried, rows, strict=True):
            same, seconds = setting.precision == dtype, row["tpot_s"]
            if same not in fastest or seconds < fastest[same][0]:
                fastest[same] = (seconds, setting)
        taken = [setting for _, setting in fastest.values()]
        found.settings.extend((name, setting) for setting in taken)
        for (setting, _), row in zip(tried, rows, strict=True):
            found.trials.append({**row, "steps": steps.timed, "taken": setting in taken})
    return found


def open_setting(name: str, peer: Peer, setting: Setting, batch: int, capacity: int) -> PeerDecode:
    """Raises PeerUnavailable: the setting cannot run."""
    return PeerDecode(name, peer.version, setting, peer.open(setting, batch, capacity))
