"""Extraction: many records are scattered over real prose, and all of them are to be copied out.

Nearly all of the answer must be read from the prompt again, place after place: where summaries of low rank are known
to lose most (arXiv 2604.08426).
"""

from __future__ import annotations

import numpy as np
from needles import keys, numbers
from questions import Fact, Page, Question

_RECORDS = 12
_DIGITS = 5
_ANSWER_TOKENS = 20 * _RECORDS  # "* Entry number 7: amber-anchor, 12345" and the end of its line


def extraction(page: Page, depth: float, rng: np.random.Generator) -> Question:
    """A record in every twelfth of the text, at `depth` of it. The answer's first words show the form of all."""
    items, values = keys(rng, _RECORDS), numbers(rng, _RECORDS, _DIGITS)
    facts = [
        Fact(depth=(i + depth) / _RECORDS, sentence=f"Entry number {i + 1}: {item}, {value}.")
        for i, (item, value) in enumerate(zip(items, values, strict=True))
    ]
    return page.hide(
        rng,
        facts,
        before="Numbered entries of a ledger are hidden within the following text. Make sure to memorize all of "
        "them. I will ask you to copy them out afterwards.",
        question="What are the numbered entries mentioned in the provided text?",
        answer="The numbered entries mentioned in the provided text are:\n\n* Entry number 1:",
        expected=values,
        answer_tokens=_ANSWER_TOKENS,
    )
