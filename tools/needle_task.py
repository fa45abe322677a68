"""The task of answering questions about long prompts: how many of `resident`'s right answers each plan keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from intervals import FORM, mean_interval, mean_of_ratios_interval, ratio_interval
from kinds import make_questions
from questions import Question
from tasks import Bench, decode, describe, token_digest

from swapkv_jax import Plan, PlanError
from swapkv_jax.capture import CapturedPrefill

CAN = 0.2
"""Below this mean score `resident` cannot do a task itself, and nothing is said of what a plan loses at it."""


def answer_questions(
    bench: Bench,
    texts: Mapping[str, str],
    *,
    kinds: Sequence[str],
    lengths: Sequence[int],
    count: int,
    seed: int,
    chat: bool,
) -> dict[str, Any]:
    """What `resident` and every plan answer, greedily, to `count` questions of each kind at each length.

    Raises:
      PlanError: a plan that cannot do it, or no plan that gets along with its memory at any length.
      UsageError: see `make_questions`.
    """
    cells = []
    for length in lengths:
        for kind in kinds:
            questions = make_questions(
                kind, bench.model.tokenizer, texts, length=length, count=count, seed=seed, chat=chat
            )
            cells.append(_Cell(bench, kind, length, questions))
    if not any(cell.plans for cell in cells):
        raise next(error for cell in cells for error in cell.unfit.values())
    results = [cell.result() for cell in cells]
    return {
        "seed": seed,
        "questions": count,
        "form": "chat" if chat else "raw",
        "interval": FORM,
        "resident_can": CAN,
        "cells": results,
        "summary": _summary(bench.plans, results),
    }


class _Cell:
    """The questions of one kind and length, and the plans that fit them."""

    def __init__(self, bench: Bench, kind: str, length: int, questions: Sequence[Question]):
        self._bench, self._kind, self._length, self._questions = bench, kind, length, questions
        self._tokens = max(question.answer_tokens for question in questions)
        self._reference = bench.fit(bench.reference, length + self._tokens, len(questions))
        self.plans: dict[str, Plan]
        self.unfit: dict[str, PlanError]
        self.plans, self.unfit = bench.fit_all(length + self._tokens, len(questions))

    def result(self) -> dict[str, Any]:
        """Every answer, its score, and what is lost."""
        questions = self._questions
        prompts = [question.prompt for question in questions]
        with self._bench.captured(prompts, like=self._reference) as prefill:
            theirs, _ = self._answers("resident", self._reference, prefill)
            answered = {name: self._answers(name, plan, prefill) for name, plan in self.plans.items()}
        known = _scores(questions, theirs)
        ours = {name: _scores(questions, answers) for name, (answers, _) in answered.items()}
        return {
            "kind": self._kind,
            "length": self._length,
            "answer_tokens": self._tokens,
            "resident": {**_mean(known), "can": fmean(known) >= CAN},
            "plans": [
                {
                    "name": name,
                    **describe(plan, self._bench.model),
                    **_mean(ours[name]),
                    **_kept(known, ours[name]),
                    "reuse_rate": answered[name][1],
                }
                for name, plan in self.plans.items()
            ],
            "unfit": {name: str(error) for name, error in self.unfit.items()},
            "questions": [
                {
                    "text": question.text,
                    "depths": question.depths,
                    "positions": question.positions,
                    "tokens": len(question.prompt),
                    "expected": question.expected,
                    "resident": {"score": known[i], "answer": theirs[i]},
                    "plans": {
                        name: {"score": ours[name][i], "answer": answers[i]}
                        for name, (answers, _) in answered.items()
                    },
                }
                for i, question in enumerate(questions)
            ],
        }

    def _answers(
        self, name: str, plan: Plan, prefill: Callable[[], CapturedPrefill]
    ) -> tuple[list[str], float | None]:
        """A plan's answers, and its reuse."""
        prompts = [question.prompt for question in self._questions]
        key = self._bench.key(
            "needle",
            plan,
            reference=self._reference.hash,  # its prefill
            prompts=token_digest(prompts),
            tokens=self._tokens,
            eos=sorted(self._bench.model.eos_token_ids),
        )
        part = self._bench.part(key, functools.partial(self._decode, name, plan, prefill, prompts))
        return [self._bench.model.tokenizer.decode(ids) for ids in part["ids"]], part["reuse_rate"]

    def _decode(
        self, name: str, plan: Plan, prefill: Callable[[], CapturedPrefill], prompts: Sequence[list[int]]
    ) -> dict[str, Any]:
        ids: list[list[int]] = [[] for _ in prompts]
        use: dict[str, Any] = {}
        title = f"{self._kind} {self._length}: {name}"
        for rows, _, step in decode(self._bench, title, plan, prefill(), prompts, self._tokens, use=use):
            for row, token in zip(rows, step.tokens, strict=False):
                if token is not None:
                    ids[row].append(token)
        return {"ids": ids, **use}


def _scores(questions: Sequence[Question], answers: Sequence[str]) -> list[float]:
    return [question.score(answer) for question, answer in zip(questions, answers, strict=True)]


def _mean(scores: Sequence[float]) -> dict[str, Any]:
    return {"score": fmean(scores), "score_interval": mean_interval(scores)}


def _kept(known: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """What is left of resident's scores where they are not 0 (None: nowhere), and how many questions got worse and
    better."""
    parts, wholes = _where_known(known, ours)
    return {
        "relative": sum(parts) / sum(wholes) if wholes else None,
        "relative_interval": ratio_interval(parts, wholes) if wholes else None,
        "lost": sum(our < their for their, our in zip(known, ours, strict=True)),
        "gained": sum(our > their for their, our in zip(known, ours, strict=True)),
    }


def _where_known(known: Sequence[float], ours: Sequence[float]) -> tuple[list[float], list[float]]:
    """Scores on the questions that resident knows something about: ours and its."""
    pairs = [(our, their) for their, our in zip(known, ours, strict=True) if their > 0]
    return [our for our, _ in pairs], [their for _, their in pairs]


def _summary(plans: Mapping[str, Plan], cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per plan, the mean of what is left of resident's score over the cells that resident can do."""
    rows = []
    for name, candidate in plans.items():
        counted, fractions, relatives = [], [], []
        for cell in cells:
            row = next((row for row in cell["plans"] if row["name"] == name), None)
            if row is None or not cell["resident"]["can"]:
                continue
            known = [question["resident"]["score"] for question in cell["questions"]]
            ours = [question["plans"][name]["score"] for question in cell["questions"]]
            counted.append(_where_known(known, ours))
            fractions.append(row["memory_fraction"])
            relatives.append(row["relative"])
        rows.append(
            {
                "name": name,
                "strategy": None if candidate.selection is None else candidate.selection.strategy_name,
                "cells": len(counted),
                "memory_fraction": fmean(fractions) if counted else None,
                "relative": fmean(relatives) if counted else None,
                "relative_interval": mean_of_ratios_interval(counted) if counted else None,
            }
        )
    return rows
