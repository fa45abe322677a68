"""A greedy walk over choices: the fastest that fits the memory and loses no more than it may, or what loses least."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from swapkv_jax.errors import PlanError
from swapkv_jax.tuner.choice import Choice, Space

_WORTH = 0.998  # a step must save so much, else noise would be followed
_AS_FAST = 1.08  # no prediction tells choices apart that are closer

C = TypeVar("C", bound=Hashable)  # a choice: any orderable record
K = TypeVar("K", bound=Hashable, contravariant=True)


class Cost(NamedTuple):
    """What is measured of a choice."""

    loss: float
    seconds: float


class Costs(Protocol[K]):
    """What a walk asks of a choice, by measuring it."""

    def loss(self, choice: K, /) -> float: ...

    def seconds(self, choice: K, /) -> float:
        """Seconds per step."""
        ...


class Oracle(Costs[Choice], Protocol):
    """What is known of a tuner's choice: `held` for nothing, `guess` for next to nothing, the others by measuring."""

    def held(self, choice: Choice, /) -> int:
        """Bytes of memory it takes."""
        ...

    def guess(self, choice: Choice, like: Choice, /) -> float:
        """Seconds per step as far as can be told from `like`, which has been measured."""
        ...


@dataclass(frozen=True, kw_only=True)
class Downhill(Generic[C]):
    """Which way is down: `value` falls, as long as a cost is `allowed`; `guess` says what the value of a choice may
    be, at best, as far as can be told from another that has been measured."""

    value: Callable[[Cost], float]
    allowed: Callable[[Cost], bool]
    guess: Callable[[C, C], float]


class Walker(Generic[C]):
    """Walks over choices and measures them on the way, each once.

    Attributes:
      measured: every choice that was, in that order.
      stopped: whether a `limit` kept a walk from going on.
    """

    def __init__(
        self,
        costs: Costs[C],
        neighbours: Callable[[C], Iterable[C]],
        *,
        progress: Callable[[C, float, float], None] | None = None,
    ):
        """
        Args:
          neighbours: of a choice, those one step away that may be chosen.
          progress: told each choice that is measured, its loss and its seconds.
        """
        self._costs, self._neighbours, self._progress = costs, neighbours, progress
        self.measured: dict[C, Cost] = {}
        self.stopped = False

    def measure(self, choice: C) -> Cost:
        """The cost of a choice, measured now unless it has been."""
        if choice not in self.measured:
            self.measured[choice] = Cost(self._costs.loss(choice), self._costs.seconds(choice))
            if self._progress is not None:
                self._progress(choice, *self.measured[choice])
        return self.measured[choice]

    def descend(self, start: C, way: Downhill[C], *, limit: int | None = None) -> C:
        """The end of a walk: no neighbour that seemed lower is, or is allowed; or `limit` choices were measured."""
        while (lower := self._lower(start, way, limit)) is not None:
            start = lower
        return start

    def _lower(self, start: C, way: Downhill[C], limit: int | None) -> C | None:
        here = way.value(self.measure(start))

        def expected(near: C) -> float:
            known = self.measured.get(near)
            return way.guess(near, start) if known is None else way.value(known)

        guesses: list[Any] = [(expected(near), near) for near in self._neighbours(start)]
        for guess, near in sorted(guesses):
            if guess >= here:
                break
            if near not in self.measured and limit is not None and len(self.measured) >= limit:
                self.stopped = True
                continue
            cost = self.measure(near)
            if way.allowed(cost) and way.value(cost) < _WORTH * here:
                return near
        return None


@dataclass(frozen=True, kw_only=True)
class Found:
    """The choice, and every one that was measured on the way."""

    choice: Choice
    measured: dict[Choice, Cost]


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
    starts = [near for size in space.group_tokens if (near := space.largest(size, fits))]
    if not starts:
        least = min(map(oracle.held, space))
        raise PlanError(f"no choice fits {memory} bytes of memory; the smallest takes {least}")
    walker = Walker(oracle, lambda choice: filter(fits, space.neighbours(choice)), progress=progress)
    way = fastest(loss, oracle.guess)
    ends = []
    for candidates in starts:
        start = next((choice for choice in candidates if walker.measure(choice).loss <= loss), None)
        if start is not None:
            ends.append(walker.descend(start, way))
    measured = walker.measured
    if not ends:
        best = min(measured, key=lambda choice: measured[choice].loss)
        raise PlanError(
            f"no choice that fits {memory} bytes loses as little as {loss:g}; the least found is "
            f"{measured[best].loss:.3g} ({best}): allow that much, or more memory"
        )
    return Found(choice=among_the_fastest(measured, loss), measured=measured)


def fastest(loss: float, guess: Callable[[C, C], float]) -> Downhill[C]:
    """To fewer seconds, losing no more than `loss`."""
    return Downhill(value=lambda cost: cost.seconds, allowed=lambda cost: cost.loss <= loss, guess=guess)


def least_loss(guess: Callable[[C, C], float]) -> Downhill[C]:
    """To less loss, however slow."""
    return Downhill(value=lambda cost: cost.loss, allowed=lambda _: True, guess=guess)


def among_the_fastest(measured: dict[C, Cost], loss: float) -> C:
    """The choice that loses least of those that are as fast as the fastest, to within what a prediction can tell,
    among all that lose no more than `loss`; there must be one."""
    allowed = {choice: cost for choice, cost in measured.items() if cost.loss <= loss}
    limit = _AS_FAST * min(cost.seconds for cost in allowed.values())
    return min(
        (c for c, cost in allowed.items() if cost.seconds <= limit), key=lambda choice: allowed[choice]
    )
