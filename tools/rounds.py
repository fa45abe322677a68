"""Rounds in which every contender takes a turn, and what they amount to per step."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import machine
import numpy as np
from contenders import Contender, OurEngine, Samples, Workload
from tqdm import tqdm

PAUSE_S = 0.02  # before each turn: the last one's threads stop spinning, and reading ahead comes to rest
WARM_UP = 2  # turns that are not counted, unless it is said how many steps are not

# What a row says of a contender, if it does not apply to all: None then.
DESCRIBED = (
    "policy", "selection", "peer", "setting", "precision", "tier", "plan", "physical_layers", "memory_fraction",
    "record_bytes", "group_bytes", "attended_groups", "summary_scans", "summary_bytes", "scan_s",
    "compiles_during_decode", "weight_bytes", "token_bytes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Which steps each contender makes.

    Attributes:
      timed: steps that count. burst: steps of a turn, one right after the other; the last turn may be shorter.
      warm_up: steps before them, which do not; None is two turns.
      breakdown: steps after them, not timed, of which it is found out what they consist of.
    """

    timed: int
    burst: int
    warm_up: int | None = None
    breakdown: int = 0

    @property
    def before(self) -> int:
        """Steps that are not timed before those that are."""
        return WARM_UP * self.burst if self.warm_up is None else self.warm_up

    @property
    def turns(self) -> list[tuple[int, bool]]:
        """Each turn's steps, and whether they count."""
        return [
            *((n, False) for n in self._bursts(self.before)),
            *((n, True) for n in self._bursts(self.timed)),
        ]

    def _bursts(self, steps: int) -> list[int]:
        return [min(self.burst, steps - at) for at in range(0, steps, self.burst)]

    @property
    def new_tokens(self) -> int:
        """Tokens per row that all of them take, with the one that prefill makes."""
        return 1 + self.before + self.timed + self.breakdown


def interleave(
    contenders: Sequence[Contender],
    work: Workload,
    steps: Steps,
    *,
    what: str = "",
) -> list[dict[str, Any]]:
    """One row per contender, from rounds in which each takes one turn, in an order that rotates.

    Args:
      what: this is, for the progress bar.
    """
    samples = [Samples() for _ in contenders]
    ttft = []
    title = f"{what}context {len(work.prompts[0])} batch {len(work.prompts)}"
    total = len(contenders) * (steps.new_tokens - steps.breakdown)
    with tqdm(total=total, desc=title, unit="step", file=sys.stderr) as progress:
        for contender in contenders:
            progress.set_postfix_str(f"prefill {contender.label}")
            ttft.append(contender.prefill(work))
            progress.update()
        before = machine.load()
        for turn, (size, counts) in enumerate(steps.turns):
            for index in np.roll(np.arange(len(contenders)), turn).tolist():
                progress.set_postfix_str(contenders[index].label)
                time.sleep(PAUSE_S)
                contenders[index].measure(samples[index] if counts else Samples(), size)
                progress.update(size)
    loads = [before, machine.load()]
    rows = []
    for contender, sample, seconds in zip(contenders, samples, ttft, strict=True):
        row: dict[str, Any] = dict.fromkeys(DESCRIBED)
        row |= {**contender.describe(), **_timings(sample, len(work.prompts)), **_reads(contender, sample)}
        row |= {"ttft_s": seconds, "load": loads}
        row["ratio_to"] = {
            other.label: _median(np.divide(sample.seconds, theirs.seconds).tolist())
            for other, theirs in zip(contenders, samples, strict=True)
            if other is not contender
        }
        # Tokens that are given say nothing.
        given = work.following is not None
        row["tokens_as_first"] = None if given else _agreeing(contenders[0].tokens, contender.tokens)
        rows.append(row)
    for contender, row in zip(contenders, rows, strict=True):
        row["breakdown"] = contender.breakdown(steps.breakdown) if steps.breakdown else None
    return rows


def _timings(sample: Samples, batch: int) -> dict[str, Any]:
    tpot = _median(sample.seconds)
    assert tpot is not None
    return {
        "tpot_s": tpot,
        "tpot_min_s": min(sample.seconds),
        "tpot_p90_s": float(np.percentile(sample.seconds, 90)),
        "tokens_per_s": batch / tpot,
    }


def _reads(contender: Contender, sample: Samples) -> dict[str, Any]:
    """What the timed steps waited for and read; None for what does not apply."""
    keys = (
        "wait_fraction", "bytes_read_per_step", "read_between_fraction", "disk_bytes_per_s",
        "plain_reader_bytes_per_s", "ratio_to_plain_reader", "random_reader_bytes_per_s", "hidden_fraction",
        "groups_selected_per_step", "groups_read_per_step", "groups_from_dram_per_step", "reuse_rate",
        "overflow_loads",
    )  # fmt: skip
    row: dict[str, Any] = dict.fromkeys(keys)
    if not isinstance(contender, OurEngine):
        return row
    steps, total = sum(sample.steps), sample.total
    row["wait_fraction"] = total("wait_s") / float(np.dot(sample.steps, sample.seconds))
    if contender.reads_disk:
        seconds = np.multiply(sample.steps, sample.seconds)
        rates = np.divide([counts["bytes_read"] for counts in sample.during], seconds)
        row["bytes_read_per_step"] = total("bytes_read") / steps
        row["disk_bytes_per_s"] = _median(rates.tolist())
        if total("bytes_read"):
            arrived = sum(counts["bytes_read"] for counts in sample.during)
            row["read_between_fraction"] = 1 - arrived / total("bytes_read")
        if contender.policy == "layer":
            row["plain_reader_bytes_per_s"] = _median(sample.reader_rate)
            row["ratio_to_plain_reader"] = _median((rates / sample.reader_rate).tolist())
        else:
            row["random_reader_bytes_per_s"] = _median(sample.reader_rate)
    if contender.policy == "group":
        row["hidden_fraction"] = max(0.0, 1 - total("wait_s") / total("read_s")) if total("read_s") else None
        for name in ("groups_selected", "groups_read", "groups_from_dram"):
            row[f"{name}_per_step"] = total(name) / steps
        selected = total("groups_selected")
        row["reuse_rate"] = 1 - total("groups_read") / selected if selected else None
        row["overflow_loads"] = int(total("overflow_loads"))
    return row


def _median(values: list[float]) -> float | None:
    return float(np.median(values)) if values else None


def _agreeing(first: list[list[int]], tokens: list[list[int]]) -> int:
    """Steps before the first in which any row chose another token."""
    return next(
        (i for i, pair in enumerate(zip(first, tokens, strict=True)) if pair[0] != pair[1]), len(first)
    )
