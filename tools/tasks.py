"""What `evaluate.py` asks of `resident` and of every plan: to follow real texts, and to find needles."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from adapters import Adapters, adapter_of
from needles import ANSWER_TOKENS, Needle, make_needles
from windows import Window

from swapkv_jax import Engine, Plan
from swapkv_jax.accounting import kv_bytes
from swapkv_jax.capture import CapturedPrefill, capture
from swapkv_jax.generation import Step
from swapkv_jax.models import Model, Progress
from swapkv_jax.quality import divergence, row_interval, surprise


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every task needs.

    Attributes:
      plans: by name; `fit` gives them the task's batch and context.
      resize: what to do with a plan once it has them.
      batch: rows decoded together.
      capture_dir: where prefills are kept, None for a directory in `store_dir` that is removed.
    """

    model: Model
    adapters: Adapters
    plans: Mapping[str, Plan]
    reference: Plan
    batch: int
    store_dir: Path
    capture_dir: Path | None
    progress: Progress
    resize: Callable[[Plan], Plan] | None = None

    def fit(self, plan: Plan, max_context: int, rows: int) -> Plan:
        """The plan for this task: `batch` rows of `max_context` tokens. PlanError if that does not work."""
        plan = msgspec.structs.replace(plan, batch=min(self.batch, rows), max_context=max_context)
        plan = plan if self.resize is None else self.resize(plan)
        plan.validate(self.model.geometry)
        return plan

    @contextlib.contextmanager
    def captured(self, prompts: Sequence[Sequence[int]]) -> Iterator[CapturedPrefill]:
        """The prompts' prefill, removed at the end unless it is to be kept."""
        with contextlib.ExitStack() as stack:
            place = self.capture_dir or Path(stack.enter_context(self.scratch()))
            yield capture(self.model, prompts, place, progress=self.progress)

    def scratch(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(prefix="evaluate-", dir=self.store_dir)


def decode(
    bench: Bench,
    name: str,
    plan: Plan,
    captured: CapturedPrefill,
    prompts: Sequence[list[int]],
    new_tokens: int,
    *,
    forced: Sequence[list[int]] | None = None,
    use: dict[str, Any] | None = None,
) -> Iterator[tuple[list[int], int, Step]]:
    """Decodes all prompts from their captured prefill, as many at a time as the plan has rows.

    Yields which prompts a step belongs to, its number and the step, whose rows beyond those prompts fill up the
    batch and count for nothing. `use` gets what the engine's cache has to say at the end.
    """
    rows, every = plan.batch, range(len(prompts))
    total = -(-len(prompts) // rows) * new_tokens
    with (
        bench.scratch() as store,
        Engine(bench.model, plan, store_dir=Path(store), adapter=adapter_of(bench.adapters, plan)) as engine,
    ):
        for first in range(0, len(prompts), rows):
            real = list(every[first : first + rows])
            batch = real + [real[-1]] * (rows - len(real))
            generation = engine.generate(
                [prompts[row] for row in batch],
                max_new_tokens=new_tokens,
                ignore_eos=forced is not None,
                return_logits=forced is not None,
                forced=None if forced is None else [forced[row] for row in batch],
                prefilled=captured.select(batch),
            )
            for number, step in enumerate(generation):
                yield real, number, step
                bench.progress(name, first // rows * new_tokens + number + 1, total)
        if use is not None:
            use["reuse_rate"] = engine.use.reuse_rate


def describe(plan: Plan, model: Model) -> dict[str, Any]:
    """A plan, and the memory its keys and values take while it decodes."""
    held = kv_bytes(plan, model.geometry)
    return {
        "policy": plan.policy,
        "hash": plan.hash,
        "plan": msgspec.to_builtins(plan),
        "kv_bytes": held,
        "full_kv_bytes": plan.full_kv_bytes,
        "memory_fraction": (held["device"] + held["dram"]) / plan.full_kv_bytes,
    }


# ---- real texts ----------------------------------------------------------------------------------------


def follow_texts(bench: Bench, windows: Sequence[Window]) -> dict[str, Any]:
    """Every plan against `resident` on the windows' own continuations, token by token.

    The first token after a prompt is not counted: its distribution is prefill's, which all have in common.
    """
    prompts, following = [w.prompt for w in windows], [w.following for w in windows]
    tokens, limit = len(following[0]) - 1, len(prompts[0]) + len(following[0])
    plans = {name: bench.fit(plan, limit, len(windows)) for name, plan in bench.plans.items()}
    reference_plan = bench.fit(bench.reference, limit, len(windows))
    logits = np.empty((len(windows), tokens, bench.model.geometry.vocab), np.float32)
    shape = (len(windows), tokens)
    with bench.captured(prompts) as captured:

        def steps(name: str, plan: Plan, use: dict[str, Any]) -> Iterator[tuple[list[int], int, np.ndarray]]:
            for rows, number, step in decode(
                bench, name, plan, captured, prompts, tokens + 1, forced=following, use=use
            ):
                assert step.logits is not None
                if number:
                    yield rows, number - 1, step.logits[: len(rows)]

        expected = np.empty(shape)
        for rows, at, ours in steps("resident", reference_plan, {}):
            logits[rows, at] = ours
            expected[rows, at] = surprise(ours, [following[row][at + 1] for row in rows])
        results = []
        for name, plan in plans.items():
            kl, top1, nll, use = np.empty(shape), np.empty(shape), np.empty(shape), {}
            for rows, at, ours in steps(name, plan, use):
                kl[rows, at] = divergence(logits[rows, at], ours)
                top1[rows, at] = logits[rows, at].argmax(axis=-1) == ours.argmax(axis=-1)
                nll[rows, at] = surprise(ours, [following[row][at + 1] for row in rows])
            results.append(
                {
                    "name": name,
                    **describe(plan, bench.model),
                    "kl": float(kl.mean()),
                    "kl_interval": row_interval(kl),
                    "top1": float(top1.mean()),
                    "top1_interval": row_interval(top1),
                    "perplexity": float(np.exp(nll.mean())),
                    **use,
                    "by_row": [
                        {"kl": float(k), "top1": float(t)}
                        for k, t in zip(kl.mean(axis=1), top1.mean(axis=1), strict=True)
                    ],
                }
            )
    return {
        "context": len(prompts[0]),
        "tokens": tokens,
        "rows": [{"text": w.text, "offset": w.offset} for w in windows],
        "interval": "95 %, bootstrap over rows",
        "resident_perplexity": float(np.exp(expected.mean())),
        "plans": results,
    }


# ---- needles -------------------------------------------------------------------------------------------


def find_needles(
    bench: Bench, texts: Mapping[str, str], *, lengths: Sequence[int], count: int, seed: int, chat: bool
) -> dict[str, Any]:
    """Which needles `resident` and every plan find, greedily, at each length."""
    tokenizer = bench.model.tokenizer
    plans = {
        length: {n: bench.fit(p, length + ANSWER_TOKENS, count) for n, p in bench.plans.items()}
        for length in lengths
    }
    questions = {
        length: make_needles(tokenizer, texts, length=length, count=count, seed=seed, chat=chat)
        for length in lengths
    }
    results = []
    for length in lengths:
        needles = questions[length]
        reference = bench.fit(bench.reference, length + ANSWER_TOKENS, count)
        with bench.captured([needle.prompt for needle in needles]) as captured:
            theirs = _answers(bench, f"{length}: resident", reference, captured, needles)
            ours = {
                name: _answers(bench, f"{length}: {name}", plan, captured, needles)
                for name, plan in plans[length].items()
            }
        results.append(_needle_result(bench.model, length, needles, plans[length], theirs, ours))
    return {
        "seed": seed,
        "needles": count,
        "answer_tokens": ANSWER_TOKENS,
        "form": "chat" if chat else "raw",
        "lengths": results,
    }


def _answers(
    bench: Bench, name: str, plan: Plan, captured: CapturedPrefill, needles: Sequence[Needle]
) -> list[str]:
    tokens: list[list[int]] = [[] for _ in needles]
    prompts = [needle.prompt for needle in needles]
    for rows, _, step in decode(bench, name, plan, captured, prompts, ANSWER_TOKENS):
        for row, token in zip(rows, step.tokens, strict=False):
            if token is not None:
                tokens[row].append(token)
    return [bench.model.tokenizer.decode(ids) for ids in tokens]


def _needle_result(
    model: Model,
    length: int,
    needles: Sequence[Needle],
    plans: Mapping[str, Plan],
    theirs: Sequence[str],
    ours: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    known = [needle.found_in(answer) for needle, answer in zip(needles, theirs, strict=True)]
    found = {
        name: [needle.found_in(answer) for needle, answer in zip(needles, answers, strict=True)]
        for name, answers in ours.items()
    }
    return {
        "length": length,
        "found_by_resident": sum(known),
        "plans": [
            {
                "name": name,
                **describe(plan, model),
                "found": sum(found[name]),
                "lost": sum(k and not f for k, f in zip(known, found[name], strict=True)),
                "gained": sum(f and not k for k, f in zip(known, found[name], strict=True)),
            }
            for name, plan in plans.items()
        ],
        "needles": [
            {
                "text": needle.text,
                "depth": needle.depth,
                "position": needle.position,
                "tokens": len(needle.prompt),
                "key": needle.key,
                "number": needle.number,
                "resident": {"found": known[i], "answer": theirs[i]},
                "plans": {name: {"found": found[name][i], "answer": ours[name][i]} for name in plans},
            }
            for i, needle in enumerate(needles)
        ],
    }
