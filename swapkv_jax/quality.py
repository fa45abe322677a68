"""What a cache policy loses against `resident`, token by token on the same text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from swapkv_jax.engine import Engine


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """`kl`: mean Kullback-Leibler divergence from the reference's next-token distribution, in nats.
    `top1`: share of tokens whose likeliest next token is the reference's too. `tokens`: how many count."""

    reference: str
    tokens: int
    kl: float
    top1: float


def divergence(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(reference ‖ other) of two arrays of logits [..., V], in nats and float64: [...]."""
    log_p, log_q = _log_softmax(reference), _log_softmax(other)
    return np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)


def surprise(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """-log p of the token that came next, in nats and float64: logits [N, V], tokens [N] → [N]."""
    return -np.take_along_axis(_log_softmax(logits), np.asarray(tokens)[:, None], axis=-1)[:, 0]


def row_interval(values: np.ndarray, resamples: int = 10_000) -> tuple[float, float] | None:
    """The 95 % interval of the mean of `values` [rows, tokens], by bootstrap over rows (Efron 1979).

    Whole rows are drawn, since the tokens of one text are not independent. None for a single row. The same
    values give the same interval.
    """
    means = values.mean(axis=1)
    if len(means) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(means), size=(resamples, len(means)))
    low, high = np.percentile(means[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def compare_with(
    reference: Engine,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    logits: Iterable[np.ndarray],
) -> Quality:
    """Holds the logits [B, V] that another engine gave, step by step, against the reference's.

    Args:
      tokens: per row, what was taken at each step; the reference is made to take the same. Steps beyond a
        row's end do not count.
    """
    steps = max(map(len, tokens))
    forced = [[*row, *[0] * (steps - len(row))] for row in tokens]
    generation = reference.generate(
        prompts, max_new_tokens=steps, ignore_eos=True, return_logits=True, forced=forced
    )
    divergences, agreements = [], []
    for i, (step, other) in enumerate(zip(generation, logits, strict=True)):
        assert step.logits is not None
        rows = [row for row, taken in enumerate(tokens) if i < len(taken)]
        divergences.append(divergence(step.logits[rows], other[rows]))
        agreements.append(step.logits[rows].argmax(axis=-1) == other[rows].argmax(axis=-1))
    kl, top1 = np.concatenate(divergences), np.concatenate(agreements)
    return Quality(
        reference=reference.plan.policy, tokens=kl.size, kl=float(kl.mean()), top1=float(top1.mean())
    )
