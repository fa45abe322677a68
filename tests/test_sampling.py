"""How the next token is chosen, against the same statement in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax import Sampling, UsageError
from swapkv_jax.sampling import choose

VOCAB = 24


def kept(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Probabilities [V] that remain, in float64: temperature, then top-k, then top-p of what is left."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    p = np.exp(scaled[order] - scaled.max())
    p /= p.sum()
    last = int(np.searchsorted(np.cumsum(p), sampling.top_p))  # the first whose sum reaches top_p
    out = np.zeros(len(logits))
    out[order[: last + 1]] = p[: last + 1] / p[: last + 1].sum()
    return out


def draws(logits: np.ndarray, sampling: Sampling, count: int) -> np.ndarray:
    """`count` independent draws after the same `logits` [V]: each row has its own randomness."""
    rows = np.broadcast_to(logits, (count, len(logits)))
    return np.asarray(choose(jnp.asarray(rows), jnp.full((count,), 5, jnp.int32), sampling))


@given(st.lists(st.sampled_from([-np.inf, -1.5, 0.0, 2.0, np.inf]), min_size=1, max_size=9))
@settings(deadline=None)
def test_greedy_takes_the_first_of_equals(row: list[float]) -> None:
    logits = np.array([row], np.float32)
    assert choose(jnp.asarray(logits), jnp.zeros((1,), jnp.int32), Sampling()).tolist() == [
        int(logits.argmax())
    ]


def test_greedy_gives_a_token_even_of_no_numbers() -> None:
    assert choose(jnp.full((2, VOCAB), jnp.nan), jnp.zeros((2,), jnp.int32), Sampling()).tolist() == [0, 0]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_greedy(seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal((3, VOCAB), np.float32)
    logits[1, 7] = logits[1, 3] = 9.0  # a tie: the first wins
    chosen = choose(jnp.asarray(logits), jnp.zeros((3,), jnp.int32), Sampling(top_k=5, top_p=0.5, seed=seed))
    assert np.asarray(chosen).tolist() == logits.argmax(axis=-1).tolist()
    assert chosen.dtype == jnp.int32
    assert int(chosen[1]) == 3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, seed=1),
        Sampling(temperature=2.0, top_k=5),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=0.7),
        Sampling(temperature=1.3, top_p=0.05),
        Sampling(temperature=1.5, top_k=8, top_p=0.8, seed=2**32 - 1),
        Sampling(temperature=1.0, top_k=VOCAB + 5),
    ],
    ids=lambda s: f"t{s.temperature}-k{s.top_k}-p{s.top_p}",
)
def test_frequencies(sampling: Sampling) -> None:
    """Nothing outside what is kept is ever drawn, and all of it as often as it should be."""
    logits = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32) * 2
    expected = kept(logits, sampling)
    count = 20_000
    seen = np.bincount(draws(logits, sampling, count), minlength=VOCAB) / count
    assert (seen[expected == 0] == 0).all()
    deviation = np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(seen - expected) <= 5 * deviation + 1e-9).all()


@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.floats(0.01, 1.0),
)
@settings(max_examples=25, deadline=None)
def test_only_what_is_kept(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    # A sum that lies within rounding of top_p may take in one token more.
    wider = Sampling(temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-5), seed=seed)
    assert set(draws(logits, sampling, 64)) <= set(np.flatnonzero(kept(logits, wider)))


def test_top_p_over_the_rounded_sum() -> None:
    """A float32 sum over the vocabulary may end short of top_p: then all is kept, not nothing."""
    top_p = float(np.nextafter(np.float32(1), np.float32(0)))
    for seed in range(20):  # several of these sums are short
        logits = np.random.default_rng(seed).standard_normal(300).astype(np.float32) / 2
        drawn = draws(logits, Sampling(temperature=1.0, top_p=top_p, seed=seed), 64)
        assert len(set(drawn.tolist())) > 20


def test_randomness_is_seed_row_and_position() -> None:
    logits = jnp.asarray(np.random.default_rng(3).standard_normal((4, 300)).astype(np.float32))
    positions = jnp.asarray([3, 3, 9, 4], jnp.int32)
    sampling = Sampling(temperature=2.0, seed=11)
    whole = np.asarray(choose(logits, positions, sampling))
    assert np.array_equal(whole, choose(logits, positions, sampling))
    # Rows before it are the same whoever else is in the batch and whatever they hold.
    assert np.array_equal(whole[:2], choose(logits[:2], positions[:2], sampling))
    others = logits.at[3].set(0.0)
    assert np.array_equal(whole[:3], np.asarray(choose(others, positions, sampling))[:3])

    def drawn(seed: int, position: int) -> list[int]:
        same = jnp.broadcast_to(logits[:1], (64, 300))
        at = jnp.full((64,), position, jnp.int32)
        return np.asarray(choose(same, at, Sampling(temperature=2.0, seed=seed))).tolist()

    assert len(set(drawn(1, 0))) > 20, "rows share their randomness"
    assert len({tuple(drawn(seed, at)) for seed in (1, 2) for at in (0, 1)}) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_settings_that_mean_nothing(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{field} must be"):
        Sampling(**{field: value})  # pyright: ignore[reportArgumentType]
