"""Which sequences may be evicted, and in what order: past ones only, least recently used first.

A layer is never evicted on its own: every token of a sequence needs every layer, so taking one layer of
a sequence that is being decoded only brings it straight back.
"""

from collections.abc import Callable, Collection


class SequenceOrder:
    """Sequences by time of last use, each either active (being decoded) or past."""

    def __init__(self) -> None:
        self._active: dict[str, bool] = {}  # in order of last use, oldest first

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._active

    @property
    def active(self) -> tuple[str, ...]:
        """Sequences being decoded, least recently used first."""
        return tuple(name for name, active in self._active.items() if active)

    @property
    def past(self) -> tuple[str, ...]:
        """Sequences that may be evicted, least recently used first."""
        return tuple(name for name, active in self._active.items() if not active)

    def activate(self, sequence: str) -> None:
        """Mark as being decoded, and as used now; a sequence not seen before is added."""
        self._use(sequence, active=True)

    def finish(self, sequence: str) -> None:
        """Mark as past, and as used now; a sequence not seen before is added."""
        self._use(sequence, active=False)

    def discard(self, sequence: str) -> None:
        """Forget the sequence, if it is known."""
        self._active.pop(sequence, None)

    def victims(self, suffices: Callable[[str], bool], keep: Collection[str] = ()) -> list[str] | None:
        """The shortest least-recently-used run of past sequences whose eviction gives enough room.

        `suffices(sequence)` is told of one more sequence at a time, and answers whether evicting all it
        has been told of would do. Nothing changes here: None means that not even evicting every past
        sequence would help, so none should be. Sequences in `keep` are not offered.
        """
        chosen = []
        for sequence in self.past:
            if sequence in keep:
                continue
            chosen.append(sequence)
            if suffices(sequence):
                return chosen
        return None

    def _use(self, sequence: str, *, active: bool) -> None:
        self._active.pop(sequence, None)  # reinsertion moves it to the most recent end
        self._active[sequence] = active
