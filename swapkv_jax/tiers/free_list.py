"""The free runs of an arena: (offset, length) pairs, sorted, disjoint, never touching each other."""

from bisect import bisect_left
from typing import Self


class FreeList:
    """Best-fit allocation over `[0, capacity)` with coalescing on release. Units are the caller's."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._runs: list[tuple[int, int]] = [(0, capacity)] if capacity else []

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(offset, length) of each free run, by offset."""
        return tuple(self._runs)

    @property
    def total(self) -> int:
        """Sum of all free lengths."""
        return sum(length for _, length in self._runs)

    @property
    def largest(self) -> int:
        """Length of the longest free run: what one allocation can get."""
        return max((length for _, length in self._runs), default=0)

    def copy(self) -> Self:
        """An independent list, to try releases out on."""
        other = type(self)(0)
        other.capacity = self.capacity
        other._runs = list(self._runs)
        return other

    def allocate(self, length: int) -> int | None:
        """Offset of `length` units cut from the front of the tightest run, or None where none is long enough.

        Best fit, since KV tensors come in a few large sizes: a hole left by one is refilled exactly by
        the next of its size, and long runs stay whole for whole batches.
        """
        if length <= 0:
            raise ValueError(f"cannot allocate {length} units: the length must be positive")
        fitting = [(run_length, offset) for offset, run_length in self._runs if run_length >= length]
        if not fitting:
            return None
        run_length, offset = min(fitting)
        index = bisect_left(self._runs, (offset,))
        if run_length == length:
            del self._runs[index]
        else:
            self._runs[index] = (offset + length, run_length - length)
        return offset

    def release(self, offset: int, length: int) -> None:
        """Give `[offset, offset + length)` back, joined with free neighbours.

        Raises:
            ValueError: the range is empty, out of bounds, or partly free already.
        """
        end = offset + length
        if length <= 0 or offset < 0 or end > self.capacity:
            raise ValueError(f"cannot release [{offset}, {end}): outside [0, {self.capacity})")
        index = bisect_left(self._runs, (offset,))
        first, last = index, index  # the runs [first, last) are replaced
        if index > 0:
            before_offset, before_length = self._runs[index - 1]
            if before_offset + before_length > offset:
                raise ValueError(f"cannot release [{offset}, {end}): part of it is free already")
            if before_offset + before_length == offset:
                first, offset = index - 1, before_offset
        if index < len(self._runs):
            after_offset, after_length = self._runs[index]
            if after_offset < end:
                raise ValueError(f"cannot release [{offset}, {end}): part of it is free already")
            if after_offset == end:
                last, end = index + 1, after_offset + after_length
        self._runs[first:last] = [(offset, end - offset)]
