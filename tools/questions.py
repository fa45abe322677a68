"""Questions about a long prompt whose answers are known, and the pages of text they are made from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swapkv_jax import UsageError
from swapkv_jax.models import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Question:
    """`prompt` ends where the answer is to come, in at most `answer_tokens` tokens that name all of `expected`.

    `depths` are where in the text its facts were to be, from 0 (the beginning) to 1 (the end), and `positions` where
    they are, moved to the nearest end of a sentence, as shares of the text's words; both are empty for a list.
    """

    text: str
    prompt: list[int]
    expected: tuple[str, ...]
    answer_tokens: int
    depths: tuple[float, ...] = ()
    positions: tuple[float, ...] = ()

    def score(self, answer: str) -> float:
        """The share of `expected` that the answer names, each as whole words and in letters of either case."""
        found = sum(
            re.search(rf"(?<!\w){re.escape(name)}(?!\w)", answer, re.IGNORECASE) is not None
            for name in self.expected
        )
        return found / len(self.expected)


class Prose:
    """A text as words. `ends` are the numbers of words after which a sentence is over, 0 among them."""

    def __init__(self, text: str):
        self.words = text.split()
        self.ends = np.array([0, *(i + 1 for i, word in enumerate(self.words) if _ends_sentence(word))])


def _ends_sentence(word: str) -> bool:
    return re.fullmatch(r".*[.!?][\"'”’)]*", word) is not None and word not in ("Mr.", "Mrs.", "Dr.", "St.")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A sentence to be put at `depth` of a text."""

    depth: float
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a prompt of at most `length` tokens is made from: a text by name, and the model's tokenizer."""

    tokenizer: Tokenizer
    name: str
    prose: Prose
    length: int
    chat: bool

    def ask(self, before: str, context: str, question: str, answer: str) -> list[int]:
        """The prompt: what to do, what it is about, the question, and how the answer begins."""
        text = f"{before}\n{context}\n{question}"
        return self.tokenizer.encode(text, chat=self.chat, answer=answer if self.chat else f"\n{answer}")

    def fill(self, build: Callable[[int], list[int]], least: int, most: int) -> int:
        """The largest number of pieces from `least` to `most` whose prompt is within `length`.

        Raises:
          UsageError: `least` are too many.
        """
        if (needed := len(build(least))) > self.length:
            raise UsageError(
                f"the question alone takes {needed} tokens, {self.length} are too few; give --lengths more"
            )
        fits, over = least, most + 1
        while over - fits > 1:
            middle = (fits + over) // 2
            if len(build(middle)) <= self.length:
                fits = middle
            else:
                over = middle
        return fits

    def hide(
        self,
        rng: np.random.Generator,
        facts: Sequence[Fact],
        *,
        before: str,
        question: str,
        answer: str,
        expected: Sequence[str],
        answer_tokens: int,
    ) -> Question:
        """A question about `facts`, which are in ascending depth, each between two sentences of a piece of the text.

        The prompt takes as many of the text's words as it holds: one more word would be too many.

        Raises:
          UsageError: `length` has no room for facts and question, or the text is too short for it.
        """
        words, length = self.prose.words, self.length
        # No token holds more than one word, so that so many words always suffice.
        starts = self.prose.ends[self.prose.ends <= max(0, len(words) - length)]
        start = int(rng.choice(starts))
        ends = self.prose.ends[self.prose.ends >= start] - start

        def places(count: int) -> list[int]:
            """How many of `count` words come before each fact."""
            here = ends[ends <= count]
            return [
                count if fact.depth == 1 else int(here[np.abs(here - fact.depth * count).argmin()])
                for fact in facts
            ]

        def build(count: int) -> list[int]:
            pieces, done = [], 0
            for fact, place in zip(facts, places(count), strict=True):
                pieces += [*words[start + done : start + place], fact.sentence]
                done = place
            context = " ".join([*pieces, *words[start + done : start + count]])
            return self.ask(before, context, question, answer)

        count = self.fill(build, 1, max(1, min(length, len(words) - start)))
        prompt = build(count)
        if start + count == len(words) and len(prompt) < length:
            raise UsageError(
                f"{self.name} has {len(words)} words, which do not fill {length} tokens; give a longer text"
            )
        return Question(
            text=self.name,
            prompt=prompt,
            expected=tuple(expected),
            answer_tokens=answer_tokens,
            depths=tuple(fact.depth for fact in facts),
            positions=tuple(place / count for place in places(count)),
        )
