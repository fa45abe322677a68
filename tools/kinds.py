"""The kinds of questions by name, and sets of them from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import needles
import numpy as np
from common_words import common_words
from extraction import extraction
from questions import Page, Prose, Question
from variable_tracking import variable_tracking

from swapkv_jax.models import Tokenizer

KINDS: dict[str, Callable[[Page, float, np.random.Generator], Question]] = {
    "single": needles.single,
    "multikey": needles.multikey,
    "multiquery": needles.multiquery,
    "multivalue": needles.multivalue,
    "variable-tracking": variable_tracking,
    "common-words": common_words,
    "extraction": extraction,
}
"""RULER's, and extraction. Each makes a question of a page, the depth of its (first) fact, and a generator."""


def make_questions(
    kind: str,
    tokenizer: Tokenizer,
    texts: Mapping[str, str],
    *,
    length: int,
    count: int,
    seed: int,
    chat: bool,
) -> list[Question]:
    """`count` questions of a kind of `KINDS`, at depths spread evenly, on `texts` (by name, in turn).

    A prompt is at most `length` tokens long, and a word more would be too many. The same arguments give the same
    questions.

    Raises:
      UsageError: `length` has no room for a question, or a text is too short for it; no chat template.
    """
    rng = np.random.default_rng([seed, length])
    prose = {name: Prose(text) for name, text in texts.items()}
    names = list(prose)
    depths = np.linspace(0, 1, count) if count > 1 else [0.5]
    questions = []
    for i, depth in enumerate(depths):
        name = names[i % len(names)]
        page = Page(tokenizer=tokenizer, name=name, prose=prose[name], length=length, chat=chat)
        questions.append(KINDS[kind](page, float(depth), rng))
    return questions
