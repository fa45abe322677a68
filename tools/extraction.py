"""Extraction: many records are scattered over real prose, and all of them are to be copied out.

Nearly all of the answer must be read from the prompt again, place after place: where summaries of low rank are known
to lose most (arXiv 2604.08426).
"""

from __future__ import annotations

import numpy as np
from needles import numbers
from questions import Fact, Page, Question

_RECORDS = 12
_DIGITS = 5
_ANSWER_TOKENS = 16 * _RECORDS  # a line of about thirteen: "Special magic number 7 is: 12345"


def extraction(page: Page, depth: float, rng: np.random.Generator) -> Question:
    """A record in every twelfth of the text, at `depth` of it. The answer's first words show the form of all."""
    values = numbers(rng, _RECORDS, _DIGITS)
    facts = [
        Fact(depth=(i + depth) / _RECORDS, sentence=f"Special magic number {i + 1} is: {value}.")
        for i, value in enumerate(values)
    ]
    return page.hide(
        rng,
        facts,
        before="Numbered special magic numbers are hidden within the following text. Make sure to memorize all of "
        "them. I will quiz you about the numbers afterwards.",
        question="What are all the numbered special magic numbers mentioned in the provided text?",
        answer="The special magic numbers mentioned in the provided text are:\n\nSpecial magic number 1 is:",
        expected=values,
        answer_tokens=_ANSWER_TOKENS,
    )
