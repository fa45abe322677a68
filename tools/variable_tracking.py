"""Variable tracking, after RULER (arXiv 2404.06654): a value is handed on from variable to variable, by assignments
that are scattered over real prose, and all variables that have it are asked for."""

from __future__ import annotations

import string

import numpy as np
from needles import numbers
from questions import Fact, Page, Question

_HOPS = 4  # RULER's: one variable gets the value, so many more get it from the one before
_LETTERS = 5
_ANSWER_TOKENS = 10 * (_HOPS + 1)  # a name of five letters takes about four, with what is between two names


def variable_tracking(page: Page, depth: float, rng: np.random.Generator) -> Question:
    """The first assignment is at `depth` of the text's first fifth, the others follow, one in every fifth."""
    (value,), names = numbers(rng, 1, digits=5), _names(rng, _HOPS + 1)
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    within = [depth, *rng.random(_HOPS)]
    facts = [
        Fact(depth=(i + float(part)) / len(names), sentence=f"VAR {name} = {source}.")
        for i, (part, name, source) in enumerate(zip(within, names, sources, strict=True))
    ]
    return page.hide(
        rng,
        facts,
        before="Variables are assigned values within the following text. Keep track of every assignment, also of "
        "those from one variable to the next.",
        question=f"Which variables are assigned the value {value} in the text above, directly or by way of others?",
        answer=f"By the assignments in the text above, {len(names)} variables have the value {value}. They are: VAR",
        expected=names,
        answer_tokens=_ANSWER_TOKENS,
    )


def _names(rng: np.random.Generator, count: int) -> list[str]:
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn["".join(rng.choice(list(string.ascii_uppercase), _LETTERS))] = None
    return list(drawn)
