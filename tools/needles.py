"""Needles in a haystack of prose, after RULER's retrieval tasks (arXiv 2404.06654).

Sentences that give a key its number are put between sentences of real prose; the question comes after the prose,
and the answer's beginning is given, so that the numbers are all that is left to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from questions import Fact, Page, Question

_SEVERAL = 4  # RULER's keys, queries and values
_ONE_TOKENS = 16  # a number of seven digits and what may come before it
_ALL_TOKENS = 20 * _SEVERAL  # a number each, with the key it belongs to if the model repeats that

_BEFORE_ONE = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards."
)
_BEFORE_ALL = (
    "Special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you about "
    "the numbers afterwards."
)
_NEEDLE = "One of the special magic numbers for {key} is: {number}."
_QUALITIES = (
    "amber", "brisk", "calm", "distant", "eager", "faint", "gentle", "hollow", "idle", "jolly", "keen", "lively",
    "mellow", "narrow", "ornate", "plain", "quiet", "rustic", "silver", "tidy",
)  # fmt: skip
_THINGS = (
    "anchor", "basket", "candle", "dolphin", "engine", "falcon", "garden", "harbour", "island", "jacket", "kettle",
    "lantern", "meadow", "nettle", "orchard", "pepper", "quarry", "ribbon", "saddle", "tunnel",
)  # fmt: skip


def single(page: Page, depth: float, rng: np.random.Generator) -> Question:
    """One key and its number."""
    (key,), (number,) = keys(rng, 1), numbers(rng, 1)
    return _one(page, rng, key, number, [_fact(depth, key, number)])


def multikey(page: Page, depth: float, rng: np.random.Generator) -> Question:
    """Several keys with a number each; the one at `depth` is asked for, the others are anywhere."""
    names, values = keys(rng, _SEVERAL), numbers(rng, _SEVERAL)
    depths = [depth, *rng.random(_SEVERAL - 1)]
    facts = [_fact(at, key, number) for at, key, number in zip(depths, names, values, strict=True)]
    return _one(page, rng, names[0], values[0], _ascending(facts))


def multivalue(page: Page, depth: float, rng: np.random.Generator) -> Question:
    """One key with several numbers, all of which are asked for; the first drawn is at `depth`."""
    (key,), values = keys(rng, 1), numbers(rng, _SEVERAL)
    depths = [depth, *rng.random(_SEVERAL - 1)]
    facts = [_fact(at, key, number) for at, number in zip(depths, values, strict=True)]
    return _all(page, rng, key, values, facts)


def multiquery(page: Page, depth: float, rng: np.random.Generator) -> Question:
    """Several keys with a number each, all of which are asked for; the first key is at `depth`."""
    names, values = keys(rng, _SEVERAL), numbers(rng, _SEVERAL)
    depths = [depth, *rng.random(_SEVERAL - 1)]
    facts = [_fact(at, key, number) for at, key, number in zip(depths, names, values, strict=True)]
    return _all(page, rng, f"{', '.join(names[:-1])} and {names[-1]}", values, facts)


def keys(rng: np.random.Generator, count: int) -> list[str]:
    """So many different names."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[f"{rng.choice(_QUALITIES)}-{rng.choice(_THINGS)}"] = None
    return list(drawn)


def numbers(rng: np.random.Generator, count: int, digits: int = 7) -> list[str]:
    """So many different numbers."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[str(rng.integers(10 ** (digits - 1), 10**digits))] = None
    return list(drawn)


def _fact(depth: float, key: str, number: str) -> Fact:
    return Fact(depth=float(depth), sentence=_NEEDLE.format(key=key, number=number))


def _ascending(facts: Sequence[Fact]) -> list[Fact]:
    return sorted(facts, key=lambda fact: fact.depth)


def _one(page: Page, rng: np.random.Generator, key: str, number: str, facts: Sequence[Fact]) -> Question:
    return page.hide(
        rng,
        facts,
        before=_BEFORE_ONE,
        question=f"What is the special magic number for {key} mentioned in the provided text?",
        answer=f"The special magic number for {key} mentioned in the provided text is",
        expected=[number],
        answer_tokens=_ONE_TOKENS,
    )


def _all(
    page: Page, rng: np.random.Generator, about: str, values: Sequence[str], facts: Sequence[Fact]
) -> Question:
    return page.hide(
        rng,
        _ascending(facts),
        before=_BEFORE_ALL,
        question=f"What are all the special magic numbers for {about} mentioned in the provided text?",
        answer=f"The special magic numbers for {about} mentioned in the provided text are",
        expected=values,
        answer_tokens=_ALL_TOKENS,
    )
