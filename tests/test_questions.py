"""The questions that tools/evaluate.py asks: facts lie where they are said to, prompts fill their length, a seed
fixes everything, and answers are scored by what they name."""

from __future__ import annotations

import importlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TINY, tiny_checkpoint

from swapkv_jax import UsageError, load_model
from swapkv_jax.models import Tokenizer

EMMA = (Path(__file__).parent / "texts" / "emma.txt").read_text()
TEXTS = {"a": EMMA, "b": EMMA[5000:]}
WORD_TOKENS = 40  # more than any word of the text is of the tiny tokenizer's
FACTS = {
    "single": 1,
    "multikey": 4,
    "multiquery": 4,
    "multivalue": 4,
    "variable-tracking": 5,
    "extraction": 12,
}
LEAST = {"extraction": 1400, "common-words": 1200}  # tokens, else 700


@pytest.fixture(scope="module")
def kinds() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
        yield importlib.import_module("kinds")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with patch.dict(TINY, long=replace(TINY["llama"], config={"max_position_embeddings": 2048})):
        return load_model(str(tiny_checkpoint("long", tmp_path_factory.mktemp("questions")))).tokenizer


def make(kinds: ModuleType, tokenizer: Tokenizer, kind: str, **options: Any) -> list[Any]:
    defaults: dict[str, Any] = {"length": 1600, "count": 1, "seed": 0, "chat": True}
    return kinds.make_questions(kind, tokenizer, TEXTS, **{**defaults, **options})


@settings(max_examples=5, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**40), chat=st.booleans())
@pytest.mark.parametrize("kind", FACTS)
def test_facts_in_prose(
    kinds: ModuleType, tokenizer: Tokenizer, kind: str, data: st.DataObject, seed: int, chat: bool
) -> None:
    """Within the length and close to it; each fact between two sentences, at the depth that is said."""
    length = data.draw(st.integers(LEAST.get(kind, 700), 1900))
    (question,) = make(kinds, tokenizer, kind, length=length, seed=seed, chat=chat)
    assert length - WORD_TOKENS < len(question.prompt) <= length
    assert len(question.depths) == len(question.positions) == FACTS[kind]
    assert list(question.depths) == sorted(question.depths)
    assert list(question.positions) == sorted(question.positions)
    text = tokenizer.decode(question.prompt)
    for name in question.expected:
        assert re.search(rf"(?<!\w){name}(?!\w)", text)
    _, context, rest = text.split("\n", 2)
    facts = re.findall(FACT, context)
    assert len(facts) == FACTS[kind]
    prose = re.split(FACT, context)
    words = [len(piece.split()) for piece in prose]
    places = list(itertools.accumulate(words))
    assert list(question.positions) == pytest.approx([place / places[-1] for place in places[:-1]])
    assert " ".join(" ".join(prose).split()) in " ".join(EMMA.split())
    for piece, place in zip(prose, places[:-1], strict=False):
        if piece.split() and place < places[-1]:
            assert piece.rstrip().rstrip("\"'”’)")[-1] in ".!?"
    assert not re.search(FACT, rest)


FACT = (
    r"(?:One of the special magic numbers for [a-z]+-[a-z]+ is: \d{7}\.|VAR [A-Z]{5} = (?:\d{5}|VAR [A-Z]{5})\.|"
    r"Special magic number \d+ is: \d{5}\.)"
)


@settings(max_examples=5, deadline=None)
@given(length=st.integers(1200, 6000), seed=st.integers(0, 2**40), chat=st.booleans())
def test_common_words(kinds: ModuleType, tokenizer: Tokenizer, length: int, seed: int, chat: bool) -> None:
    """Ten words far more often than any other, in a list that is numbered from one on."""
    (question,) = make(kinds, tokenizer, "common-words", length=length, seed=seed, chat=chat)
    assert length - WORD_TOKENS < len(question.prompt) <= length
    entries = re.findall(r"(\d+)\. (\w+)", tokenizer.decode(question.prompt).split("\n")[1])
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    often, seldom = (30, 3) if length >= 4096 else (6, 1)
    counts = Counter(word for _, word in entries)
    common = {word for word, times in counts.items() if times == often}
    assert common == set(question.expected)
    assert len(common) == 10
    assert max((times for word, times in counts.items() if word not in common), default=0) <= seldom
    assert counts.keys() <= {word.lower() for word in re.findall(r"[A-Za-z]+", EMMA)}


@pytest.mark.parametrize("kind", [*FACTS, "common-words"])
def test_a_seed_fixes_the_questions(kinds: ModuleType, tokenizer: Tokenizer, kind: str) -> None:
    first = make(kinds, tokenizer, kind, count=3, seed=4)
    assert make(kinds, tokenizer, kind, count=3, seed=4) == first
    assert make(kinds, tokenizer, kind, count=3, seed=5) != first
    assert [question.text for question in first] == ["a", "b", "a"]
    assert len({question.expected for question in first}) == 3


def test_depths_of_single_needles(kinds: ModuleType, tokenizer: Tokenizer) -> None:
    """From the beginning to the end, moved by no more than a few sentences."""
    questions = make(kinds, tokenizer, "single", count=5)
    assert [question.depths for question in questions] == [(depth,) for depth in (0, 0.25, 0.5, 0.75, 1)]
    assert questions[0].positions == (0,)
    assert questions[-1].positions == (1,)
    assert all(abs(q.positions[0] - q.depths[0]) < 0.2 for q in questions)
    assert make(kinds, tokenizer, "single")[0].depths == (0.5,)


def test_the_asked_key_is_at_the_depth(kinds: ModuleType, tokenizer: Tokenizer) -> None:
    for question in make(kinds, tokenizer, "multikey", count=4):
        text = tokenizer.decode(question.prompt)
        key = re.findall(r"magic number for ([a-z-]+) mentioned", text)[-1]
        (number,) = question.expected
        assert f"for {key} is: {number}." in text
        assert len(set(re.findall(r"numbers for ([a-z-]+) is", text))) == 4
    depths = np.array([question.depths for question in make(kinds, tokenizer, "multikey", count=4)])
    assert all(wanted in row for wanted, row in zip(np.linspace(0, 1, 4), depths, strict=True))


def test_variables_hand_on_one_value(kinds: ModuleType, tokenizer: Tokenizer) -> None:
    """Following the assignments gives every expected variable the value that is asked for."""
    for question in make(kinds, tokenizer, "variable-tracking", count=4):
        text = tokenizer.decode(question.prompt)
        values: dict[str, str] = {}
        for name, source, value in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))\.", text):
            values[name] = value or values[source]
        asked = re.findall(r"the value (\d+) in the text", text)[-1]
        assert [name for name, value in values.items() if value == asked] == list(question.expected)


@pytest.mark.parametrize(
    ("expected", "answer", "score"),
    [
        (["1234567"], " 1234567.", 1),
        (["1234567"], "12345678", 0),
        (["1234567"], "It is 01234567", 0),
        (["ABCDE", "FGHIJ"], "VAR abcde, FGHIJ", 1),
        (["sail", "boat", "tree", "wind"], "1. Sailor 2. boat\n3. tree-top", 0.5),
        (["12", "34"], "", 0),
    ],
)
def test_scores(kinds: ModuleType, expected: list[str], answer: str, score: float) -> None:
    Question = importlib.import_module("questions").Question
    question = Question(text="a", prompt=[1], expected=tuple(expected), answer_tokens=1)
    assert question.score(answer) == score


def test_what_does_not_fit(kinds: ModuleType, tokenizer: Tokenizer) -> None:
    short = {"short": "He was not at home."}
    options: dict[str, Any] = {"count": 2, "seed": 0, "chat": True}
    with pytest.raises(UsageError, match="short has 5 words, which do not fill 1000 tokens"):
        kinds.make_questions("single", tokenizer, short, length=1000, **options)
    with pytest.raises(UsageError, match="short has 1 different words of 4 to 10 letters, which do not fill"):
        kinds.make_questions("common-words", tokenizer, short, length=3000, **options)
    with pytest.raises(UsageError, match="are too few; give --lengths more"):
        kinds.make_questions("common-words", tokenizer, TEXTS, length=500, **options)
