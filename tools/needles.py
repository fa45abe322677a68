"""Needles in a haystack of prose: RULER's single-needle retrieval (arXiv 2404.06654), from a seed.

One sentence that gives a key its number is put between two sentences of real prose; the question comes after
the prose, and the answer's beginning is given, so that the number is all that is left to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from swapkv_jax import UsageError
from swapkv_jax.models import Tokenizer

ANSWER_TOKENS = 16  # a number of seven digits and what may come before it

_TASK = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "number afterwards.\n{context}\nWhat is the special magic number for {key} mentioned in the provided text?"
)
_NEEDLE = "One of the special magic numbers for {key} is: {number}."
_ANSWER = "The special magic number for {key} mentioned in the provided text is"
_QUALITIES = (
    "amber", "brisk", "calm", "distant", "eager", "faint", "gentle", "hollow", "idle", "jolly", "keen", "lively",
    "mellow", "narrow", "ornate", "plain", "quiet", "rustic", "silver", "tidy",
)  # fmt: skip
_THINGS = (
    "anchor", "basket", "candle", "dolphin", "engine", "falcon", "garden", "harbour", "island", "jacket", "kettle",
    "lantern", "meadow", "nettle", "orchard", "pepper", "quarry", "ribbon", "saddle", "tunnel",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Needle:
    """One question. `prompt` ends where the number is to come.

    `depth` is where the needle was to be, from 0 (the haystack's beginning) to 1 (its end); `position` is where
    it is, moved to the nearest end of a sentence, as a share of the haystack's words.
    """

    text: str
    depth: float
    position: float
    key: str
    number: int
    prompt: list[int]

    def found_in(self, answer: str) -> bool:
        return str(self.number) in answer


def make_needles(
    tokenizer: Tokenizer, texts: Mapping[str, str], *, length: int, count: int, seed: int, chat: bool
) -> list[Needle]:
    """`count` needles at depths spread evenly, each in a piece of its own of one of `texts` (by name, in turn).

    A prompt takes as many of the text's words as `length` tokens hold: it is at most `length` tokens long, and
    one more word would be too many. The same arguments give the same needles.

    Raises:
      UsageError: `length` has no room for the question, or a text is too short for it; no chat template.
    """
    rng = np.random.default_rng([seed, length])
    prose = {name: _Prose(text) for name, text in texts.items()}
    names = list(prose)
    depths = np.linspace(0, 1, count) if count > 1 else [0.5]
    return [
        _make(tokenizer, names[i % len(names)], prose[names[i % len(names)]], float(depth), length, rng, chat)
        for i, depth in enumerate(depths)
    ]


class _Prose:
    """A text as words. `ends` are the numbers of words after which a sentence is over, 0 among them."""

    def __init__(self, text: str):
        self.words = text.split()
        self.ends = np.array([0, *(i + 1 for i, word in enumerate(self.words) if _ends_sentence(word))])


def _ends_sentence(word: str) -> bool:
    return re.fullmatch(r".*[.!?][\"'”’)]*", word) is not None and word not in ("Mr.", "Mrs.", "Dr.", "St.")


def _make(
    tokenizer: Tokenizer,
    name: str,
    prose: _Prose,
    depth: float,
    length: int,
    rng: np.random.Generator,
    chat: bool,
) -> Needle:
    key = f"{rng.choice(_QUALITIES)}-{rng.choice(_THINGS)}"
    number = int(rng.integers(10**6, 10**7))
    # No token holds more than one word, so that so many words always suffice.
    starts = prose.ends[prose.ends <= max(0, len(prose.words) - length)]
    start = int(rng.choice(starts))
    ends = prose.ends - start

    def build(words: int) -> tuple[list[int], int]:
        """The prompt with so many words of prose, and how many of them come before the needle."""
        here = np.concatenate([ends[(ends >= 0) & (ends <= words)], [words] if depth == 1 else []]).astype(
            int
        )
        before = int(here[np.abs(here - depth * words).argmin()])
        pieces = [
            *prose.words[start : start + before],
            _NEEDLE.format(key=key, number=number),
            *prose.words[start + before : start + words],
        ]
        task = _TASK.format(context=" ".join(pieces), key=key)
        answer = _ANSWER.format(key=key)
        return tokenizer.encode(task, chat=chat, answer=answer if chat else f"\n{answer}"), before

    if len(build(1)[0]) > length:
        raise UsageError(
            f"a needle's question alone takes {len(build(1)[0])} tokens, {length} are too few; give --lengths more"
        )
    fits, over = 1, min(length, len(prose.words) - start) + 1
    while over - fits > 1:
        middle = (fits + over) // 2
        if len(build(middle)[0]) <= length:
            fits = middle
        else:
            over = middle
    if start + fits == len(prose.words) and fits < length:
        raise UsageError(
            f"{name} has {len(prose.words)} words, which do not fill {length} tokens; give a longer text"
        )
    prompt, before = build(fits)
    return Needle(text=name, depth=depth, position=before / fits, key=key, number=number, prompt=prompt)
