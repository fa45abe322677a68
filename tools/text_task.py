"""The task of following real texts: how far from `resident`'s each plan's next-token distributions are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from tasks import Bench, decode, describe, token_digest
from windows import Window

from swapkv_jax import Plan
from swapkv_jax.capture import CapturedPrefill
from swapkv_jax.quality import divergence, row_interval, surprise


def follow_texts(bench: Bench, windows: Sequence[Window]) -> dict[str, Any]:
    """Every plan against `resident` on the windows' own continuations, token by token.

    The first token after a prompt is not counted: its distribution is prefill's, which all have in common.

    Raises:
      PlanError: a plan that cannot do it, or no plan that gets along with its memory.
    """
    prompts, following = [w.prompt for w in windows], [w.following for w in windows]
    tokens, limit = len(following[0]) - 1, len(prompts[0]) + len(following[0])
    plans, unfit = bench.fit_all(limit, len(windows))
    if not plans:
        raise next(iter(unfit.values()))
    reference = bench.fit(bench.reference, limit, len(windows))
    inputs = {
        "reference": reference.hash,
        "prompts": token_digest(prompts),
        "following": token_digest(following),
    }
    keys = {name: bench.key("text", plan, **inputs) for name, plan in plans.items()}
    reference_key = bench.key("text", reference, **inputs)
    with bench.captured(prompts, like=reference) as prefill:
        followed = _Followed(bench, prefill, prompts, following)
        if not all(map(bench.is_kept, [reference_key, *keys.values()])):
            followed.take_reference(reference)
        expected = np.array(bench.part(reference_key, followed.surprises)["nll"])
        results = []
        for name, plan in plans.items():
            part = bench.part(keys[name], functools.partial(followed.compare, name, plan))
            kl, top1, nll = (np.array(part[field]) for field in ("kl", "top1", "nll"))
            results.append(
                {
                    "name": name,
                    **describe(plan, bench.model),
                    "kl": float(kl.mean()),
                    "kl_interval": row_interval(kl),
                    "top1": float(top1.mean()),
                    "top1_interval": row_interval(top1),
                    **_perplexity("perplexity", nll),
                    "reuse_rate": part["reuse_rate"],
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
        **_perplexity("resident_perplexity", expected),
        "plans": results,
        "unfit": {name: str(error) for name, error in unfit.items()},
    }


def _perplexity(name: str, nll: np.ndarray) -> dict[str, Any]:
    """Of -log p [rows, tokens] in nats, with its interval."""
    interval = row_interval(nll)
    return {
        name: float(np.exp(nll.mean())),
        f"{name}_interval": None if interval is None else [float(np.exp(end)) for end in interval],
    }


class _Followed:
    """Windows whose continuations decoders are made to follow from one prefill: `resident`'s logits, and what
    others' are beside them."""

    def __init__(
        self,
        bench: Bench,
        prefill: Callable[[], CapturedPrefill],
        prompts: Sequence[list[int]],
        following: Sequence[list[int]],
    ):
        self._bench, self._prefill, self._prompts, self._following = bench, prefill, prompts, following
        self._shape = (len(prompts), len(following[0]) - 1)
        self._logits = np.empty((0, 0, 0), np.float32)

    def take_reference(self, plan: Plan) -> None:
        """Has `resident` decode, for `surprises` and `compare`."""
        self._logits = np.empty((*self._shape, self._bench.model.geometry.vocab), np.float32)
        for rows, at, logits in self._steps("resident", plan, {}):
            self._logits[rows, at] = logits

    def surprises(self) -> dict[str, Any]:
        """-log p by `resident` of each row's tokens."""
        return {
            "nll": [
                surprise(logits, following[1:]).tolist()
                for logits, following in zip(self._logits, self._following, strict=True)
            ]
        }

    def compare(self, name: str, plan: Plan) -> dict[str, Any]:
        """KL, agreement and -log p [rows, tokens] of a plan, and its reuse."""
        kl, top1, nll, use = np.empty(self._shape), np.empty(self._shape), np.empty(self._shape), {}
        for rows, at, logits in self._steps(name, plan, use):
            reference = self._logits[rows, at]
            kl[rows, at] = divergence(reference, logits)
            top1[rows, at] = reference.argmax(axis=-1) == logits.argmax(axis=-1)
            nll[rows, at] = surprise(logits, [self._following[row][at + 1] for row in rows])
        return {"kl": kl.tolist(), "top1": top1.tolist(), "nll": nll.tolist(), **use}

    def _steps(
        self, name: str, plan: Plan, use: dict[str, Any]
    ) -> Iterator[tuple[list[int], int, np.ndarray]]:
        """Rows, the number of the token that their logits [rows, V] are of, and these."""
        for rows, number, step in decode(
            self._bench,
            name,
            plan,
            self._prefill(),
            self._prompts,
            self._shape[1] + 1,
            forced=self._following,
            use=use,
        ):
            assert step.logits is not None
            if number:
                yield rows, number - 1, step.logits[: len(rows)]
