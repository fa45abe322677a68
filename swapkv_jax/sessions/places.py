"""Where an open session's groups are: those it found, and those it writes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from swapkv_jax.sessions.files import clip
from swapkv_jax.tiers.catalog_rows import Span


@dataclass
class Run:
    """Groups that a session writes: from its group `start` on, to the places from `first` on of a file, which is
    None until there is one. All are sealed with one nonce, and none is written twice."""

    start: int
    first: int
    file: str | None
    nonce: int

    def place(self, group: int) -> int:
        """Where in the file a group of the session is."""
        return self.first + group - self.start


class Places:
    """The spans a session was opened with, then the runs it has begun, each as far as the next one's start."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self._found = spans
        self._runs: list[Run] = []

    def begin(self, group: int, place: tuple[str, int] | None) -> None:
        """From `group` on, groups are written anew: to a place in a file, or to a file that is yet to be made."""
        kept = [run for run in self._runs if run.start < group]
        if not kept:
            self._found = clip(self._found, group)
        file, first = place or (None, 0)
        # SQLite's numbers have 63 bits; a record that was never written has nonce 0.
        self._runs = [*kept, Run(group, first, file, secrets.randbits(63) | 1)]

    def spans(self, groups: int) -> tuple[Span, ...]:
        """Where the first `groups` groups are."""
        first = self._runs[0].start if self._runs else groups
        spans = clip(self._found, min(groups, first))
        for run, start, end in self.runs(first, groups):
            assert run.file is not None  # it has groups
            spans += (Span(run.file, run.place(start), end - start, run.nonce),)
        return spans

    def runs(self, start: int, stop: int) -> Iterator[tuple[Run, int, int]]:
        """The runs that groups `start` to `stop` belong to, each with which of them do."""
        ends = [*(run.start for run in self._runs[1:]), stop]
        for run, end in zip(self._runs, ends, strict=True) if self._runs else ():
            if max(start, run.start) < min(stop, end):
                yield run, max(start, run.start), min(stop, end)

    @property
    def writing(self) -> set[str]:
        """Files that groups are written to."""
        return {run.file for run in self._runs if run.file is not None}
