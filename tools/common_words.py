"""The most common words of a list, after RULER's aggregation task (arXiv 2404.06654)."""

from __future__ import annotations

import numpy as np
from questions import Page, Question

from swapkv_jax import UsageError

_COMMON = 10
_OFTEN, _SELDOM = 30, 3  # times that a common word and another one are in the list
_SHORT, _SHORT_OFTEN, _SHORT_SELDOM = 4096, 6, 1  # RULER's for prompts of fewer tokens
_LETTERS = range(4, 11)
_ANSWER_TOKENS = 8 * _COMMON  # a word is one to three tokens, with its number and what is between


def common_words(page: Page, depth: float, rng: np.random.Generator) -> Question:
    """Ten words of the text that a shuffled list of its words has often, the others seldom. A list has no `depth`.

    Raises:
      UsageError: `length` has no room for the common words, or the text has too few different ones.
    """
    often, seldom = (_OFTEN, _SELDOM) if page.length >= _SHORT else (_SHORT_OFTEN, _SHORT_SELDOM)
    known = sorted({word.strip(".,;:!?\"'()“”‘’").lower() for word in page.prose.words})
    words = rng.permutation([w for w in known if w.isascii() and w.isalpha() and len(w) in _LETTERS]).tolist()
    common, others = words[:_COMMON], words[_COMMON:]
    entries = [*common * often, *(word for word in others for _ in range(seldom))]
    order = rng.random(len(entries))

    def build(count: int) -> list[int]:
        shuffled = (entries[i] for i in np.argsort(order[:count]))
        return page.ask(
            "The following is a numbered list of words, some of which come up far more often than the others. "
            "Remember those that come up most often.",
            " ".join(f"{number}. {word}" for number, word in enumerate(shuffled, start=1)),
            f"Which {_COMMON} words come up most often in the list above?",
            f"The {_COMMON} words that come up most often in the list are:",
        )

    least = _COMMON * often
    count = page.fill(build, least, max(least, min(page.length, len(entries))))
    prompt = build(count)
    if count >= len(entries) and len(prompt) < page.length:
        raise UsageError(
            f"{page.name} has {len(words)} different words of {_LETTERS[0]} to {_LETTERS[-1]} letters, which do not "
            f"fill {page.length} tokens; give a longer text"
        )
    return Question(text=page.name, prompt=prompt, expected=tuple(common), answer_tokens=_ANSWER_TOKENS)
