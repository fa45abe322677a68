"""A greedy walk over choices: the fastest that fits the memory and loses no more than it may."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from swapkv_jax.errors import PlanError
from swapkv_jax.tuner.choice import Choice, Space

Measure = Callable[[Choice], tuple[float, float]]
Fits = Callable[[Choice], bool]
_WORTH = 0.998  # a step must save so much, else noise would be followed
_AS_FAST = 1.08  # no prediction tells choices apart that are closer


class Oracle(Protocol):
    """What is known of a choice: `held` for nothing, `guess` for next to nothing, the others by measuring."""

    def held(self, choice: Choice) -> int:
        """Bytes of memory it takes."""
        ...

    def guess(self, choice: Choice, like: Choice) -> float:
        """Seconds per step as far as can be told from `like`, which has been measured."""
        ...

    def loss(self, choice: Choice) -> float: ...

    def seconds(self, choice: Choice) -> float:
        """Seconds per step."""
        ...


@dataclass(frozen=True, kw_only=True)
class Found:
    """The choice, and every one that was measured on the way: (loss, seconds)."""

    choice: Choice
    measured: dict[Choice, tuple[float, float]]


def search(
    space: Space,
    oracle: Oracle,
    *,
    memory: int,
    loss: float,
    progress: Callable[[Choice, float, float], None] | None = None,
) -> Found:
    """Walks from a generous choice of every group size, by small steps, each to a faster choice within the bounds.

    Of all that are as fast as the end of the fastest walk, to within what a prediction can tell, the result is the
    one that loses least.

    Args:
      memory: bytes that `held` must not exceed. loss: what `loss` must not.
      progress: told each choice that is measured, its loss and its seconds.
    Raises:
      PlanError: nothing fits the memory, or nothing that fits loses little enough; it says what would.
    """
    fits = cache(lambda choice: oracle.held(choice) <= memory)
    starts = [near for size in space.group_tokens if (near := _starts(space, size, fits))]
    if not starts:
        least = min(map(oracle.held, space))
        raise PlanError(f"no choice fits {memory} bytes of memory; the smallest takes {least}")
    measured: dict[Choice, tuple[float, float]] = {}

    def measure(choice: Choice) -> tuple[float, float]:
        if choice not in measured:
            measured[choice] = (oracle.loss(choice), oracle.seconds(choice))
            if progress is not None:
                progress(choice, *measured[choice])
        return measured[choice]

    ends = []
    for candidates in starts:
        start = next((choice for choice in candidates if measure(choice)[0] <= loss), None)
        if start is not None:
            ends.append(_descend(start, space, fits, measure, oracle, loss))
    if not ends:
        best = min(measured, key=lambda choice: measured[choice][0])
        raise PlanError(
            f"no choice that fits {memory} bytes loses as little as {loss:g}; the least found is "
            f"{measured[best][0]:.3g} ({best}): allow that much, or more memory"
        )
    fastest = min(measured[choice][1] for choice in ends)
    allowed = [c for c, (lost, seconds) in measured.items() if lost <= loss and seconds <= _AS_FAST * fastest]
    return Found(choice=min(allowed, key=lambda choice: measured[choice]), measured=measured)


def _starts(space: Space, group_tokens: int, fits: Fits) -> list[Choice]:
    """The fitting choices of a group size that no other fitting one exceeds in tokens, slots and rank alike. More of
    these never loses more: if all of them lose too much, every choice does. Those far along in all three come first.
    """

    def places(choice: Choice) -> tuple[float, ...]:
        return (
            space.selected_tokens.index(choice.selected_tokens) / len(space.selected_tokens),
            space.kept.index(choice.kept) / len(space.kept),
            space.rank.index(choice.rank) / len(space.rank),
        )

    first = (space.lookahead[0], space.refresh[0])
    plain = [c for c in space if c.group_tokens == group_tokens and (c.lookahead, c.refresh) == first]
    largest: list[Choice] = []
    for choice in sorted(plain, key=lambda c: (sum(places(c)), c), reverse=True):
        exceeded = any(all(map(operator.le, places(choice), places(other))) for other in largest)
        if not exceeded and fits(choice):
            largest.append(choice)
    return largest


def _descend(
    start: Choice, space: Space, fits: Fits, measure: Measure, oracle: Oracle, bound: float
) -> Choice:
    """The end of a walk: no neighbour that seemed faster is, or keeps the bound."""
    while True:
        here = measure(start)[1]
        guesses = {near: oracle.guess(near, start) for near in space.neighbours(start) if fits(near)}
        promising = sorted((guess, near) for near, guess in guesses.items() if guess < here)
        for _, near in promising:
            loss, seconds = measure(near)
            if loss <= bound and seconds < _WORTH * here:
                start = near
                break
        else:
            return start
