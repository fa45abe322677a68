"""Prefill: its attention against a dense reference, what it writes, and how prompts are cut into chunks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import random_model
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax import Engine, make_plan
from swapkv_jax import attention as attention_module
from swapkv_jax.attention import attend_chunk
from swapkv_jax.graph import Graph
from swapkv_jax.models import Geometry
from swapkv_jax.models.blocks import split_block
from swapkv_jax.program import Program, _prefill

ROWS, HEADS, REPEAT, DIM, SIZE, BLOCK = 2, 2, 3, 8, 44, 16  # the last of three blocks would end past SIZE
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}
GEOMETRY = Geometry(
    architecture="llama",
    layers=2,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    intermediate=24,
    vocab=40,
    norm_eps=1e-5,
    rope_theta=1e4,
    max_positions=256,
    tied=True,
)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int) -> np.ndarray:
    """float64 softmax of q [C, Hkv, R, D] over k [Hkv, D, N], v [Hkv, N, D], query i up to start + i."""
    scores = np.einsum("ckrd,kdn->ckrn", q, k) / np.sqrt(DIM)
    unseen = np.arange(k.shape[-1])[None] > start + np.arange(len(q))[:, None]
    scores = np.where(unseen[:, None, None], -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("ckrn,knd->ckrd", weights / weights.sum(axis=-1, keepdims=True), v)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def attention(request: pytest.FixtureRequest) -> tuple[str, dict[int, Callable[..., jax.Array]]]:
    """`attend_chunk` compiled for chunks shorter than, as long as, and longer than a block."""
    compiled = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "KEY_BLOCK", BLOCK)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        for chunk in (1, 5, BLOCK, 24):
            shapes = (
                (chunk, HEADS, REPEAT, DIM),
                (HEADS, DIM, chunk),
                (HEADS, chunk, DIM),
                (ROWS, HEADS, DIM, SIZE),
                (ROWS, HEADS, SIZE, DIM),
            )
            arguments = [jax.ShapeDtypeStruct(shape, request.param) for shape in shapes]
            compiled[chunk] = jax.jit(attend_chunk).lower(*arguments, scalar, scalar).compile()
    return request.param, compiled


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(0, SIZE),
    chunk=st.sampled_from([1, 5, BLOCK, 24]),
    row=st.integers(0, ROWS - 1),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_attend_chunk_is_dense_attention(
    attention: tuple[str, dict[int, Callable[..., jax.Array]]],
    start: int,
    chunk: int,
    row: int,
    spread: float,
    seed: int,
) -> None:
    dtype, compiled = attention
    rng = np.random.default_rng(seed)

    def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
        return np.array(jnp.asarray(scale * rng.standard_normal(shape), dtype))

    q = draw(chunk, HEADS, REPEAT, DIM, scale=spread)
    k_new, v_new = draw(HEADS, DIM, chunk), draw(HEADS, chunk, DIM)
    k, v = draw(ROWS, HEADS, DIM, SIZE), draw(ROWS, HEADS, SIZE, DIM)
    k[row, :, :, start:], v[row, :, start:] = np.nan, 1e6
    k[1 - row] = v[1 - row] = np.nan  # another row's cache
    ours = compiled[chunk](q, k_new, v_new, k, v, np.int32(row), np.int32(start))
    keys = np.concatenate([k[row, :, :, :start], k_new], axis=-1).astype(np.float64)
    values = np.concatenate([v[row, :, :start], v_new], axis=1).astype(np.float64)
    expected = dense(q.astype(np.float64), keys, values, start)
    tolerance = TOLERANCE[dtype] * max(1.0, spread)  # rounding of a score grows with the score
    np.testing.assert_allclose(np.asarray(ours, np.float64), expected, rtol=0, atol=tolerance)


CAPACITY, CHUNKS = 40, (8, 24)


@pytest.fixture(scope="module")
def graphs() -> dict[int, Graph]:
    block = split_block(GEOMETRY, "float32")
    heads, dim = GEOMETRY.kv_heads, GEOMETRY.head_dim
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    k = jax.ShapeDtypeStruct((ROWS, heads, dim, CAPACITY), jnp.float32)
    v = jax.ShapeDtypeStruct((ROWS, heads, CAPACITY, dim), jnp.float32)
    compiled = {}
    for chunk in (*CHUNKS, CAPACITY):
        x = jax.ShapeDtypeStruct((chunk, GEOMETRY.hidden), jnp.float32)
        arguments = [block.params, x, k, v, scalar, scalar, scalar]
        compiled[chunk] = Graph("prefill", _prefill(block), arguments, (1, 2, 3))
    return compiled


@pytest.mark.parametrize("length", [1, 7, 8, 9, 24, 25, 30, 33, 39, 40])
@pytest.mark.parametrize("sizes", [(8, 8, 8, 8, 8), (24, 24), (24, 8, 8), (8, 24, 24)])
def test_chunks_equal_one_piece(graphs: dict[int, Graph], length: int, sizes: tuple[int, ...]) -> None:
    """However a prompt is cut, past the capacity too, and nothing but the prompt's own place is written."""
    rng = np.random.default_rng(length)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape) / 4, leaf.dtype),
        split_block(GEOMETRY, "float32").params,
    )
    hidden = rng.standard_normal((length, GEOMETRY.hidden)).astype(np.float32)
    k_before = rng.standard_normal((ROWS, GEOMETRY.kv_heads, GEOMETRY.head_dim, CAPACITY), np.float32)
    v_before = np.ascontiguousarray(k_before.swapaxes(2, 3))
    row = 1

    def run(pieces: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        k, v, start, out = jnp.array(k_before), jnp.array(v_before), 0, []
        for size in pieces:
            if start >= length:
                break
            x = np.full((size, GEOMETRY.hidden), 7, np.float32)  # what follows the prompt
            part = hidden[start : start + size]
            x[: len(part)] = part
            x, k, v = graphs[size](params, jnp.array(x), k, v, *map(np.int32, (row, start, length)))
            out.append(np.asarray(x)[: len(part)])
            start += size
        return np.concatenate(out), np.asarray(k), np.asarray(v)

    x, k, v = run(sizes)
    x_whole, k_whole, v_whole = run((CAPACITY,))
    np.testing.assert_allclose(x, x_whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(k, k_whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(v, v_whole, rtol=1e-5, atol=1e-5)
    for after, before in ((k, k_before), (v.swapaxes(2, 3), k_before)):
        np.testing.assert_array_equal(after[1 - row], before[1 - row])
        np.testing.assert_array_equal(after[row, :, :, length:], before[row, :, :, length:])
        assert (after[row, :, :, :length] != before[row, :, :, :length]).all()


def test_temporaries_hold_no_cache() -> None:
    """A longer cache, or more rows of it, costs prefill no temporary memory: it is written in place."""
    block = split_block(GEOMETRY, "float32")
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    x = jax.ShapeDtypeStruct((8, GEOMETRY.hidden), jnp.float32)

    def temporaries(rows: int, size: int) -> int:
        k = jax.ShapeDtypeStruct((rows, GEOMETRY.kv_heads, GEOMETRY.head_dim, size), jnp.float32)
        v = jax.ShapeDtypeStruct((rows, GEOMETRY.kv_heads, size, GEOMETRY.head_dim), jnp.float32)
        arguments = [block.params, x, k, v, scalar, scalar, scalar]
        return Graph("prefill", _prefill(block), arguments, (1, 2, 3)).memory.temporaries

    # 8192 tokens of one head's K alone are 128 KiB; what differs is a few scalars.
    assert abs(temporaries(4, 8192) - temporaries(1, 1024)) < 256


def program_of(sizes: tuple[int, ...]) -> Program:
    program = object.__new__(Program)
    program.prefill = dict.fromkeys(sizes)  # pyright: ignore[reportAttributeAccessIssue]
    return program


@given(sizes=st.sets(st.integers(1, 600), min_size=1, max_size=4), tokens=st.integers(1, 5000))
def test_chunks_cover_the_prompt_once(sizes: set[int], tokens: int) -> None:
    pieces = program_of(tuple(sizes)).chunks(tokens)
    starts = np.cumsum([0] + [size for _, size in pieces])
    assert [start for start, _ in pieces] == starts[:-1].tolist()
    assert pieces[-1][0] < tokens <= starts[-1]  # the last chunk holds the prompt's last token
    assert {size for _, size in pieces} <= sizes
    assert all(size == min(sizes) or 4 * (tokens - start) > 3 * size - 4 for start, size in pieces)


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (1, [64]),
        (64, [64]),
        (65, [64, 64]),
        (192, [64, 64, 64]),
        (193, [256]),
        (256, [256]),
        (300, [256, 64]),
        (700, [256, 256, 64, 64, 64]),
        (705, [256, 256, 256]),
    ],
)
def test_chunks_of_the_default_plan(tokens: int, sizes: list[int]) -> None:
    chunks = make_plan(GEOMETRY, cache="resident").prefill_chunks
    assert [size for _, size in program_of(chunks).chunks(tokens)] == sizes


def test_engine_past_the_capacity() -> None:
    """A last chunk that reaches past the capacity: the answer is that of a plan with one chunk."""
    model = random_model(GEOMETRY)
    prompt = np.random.default_rng(0).integers(0, GEOMETRY.vocab, 94).tolist()
    logits = []
    for chunks in ((18, 20), (96,)):
        plan = make_plan(GEOMETRY, cache="resident", max_context=96, group_tokens=4, prefill_chunks=chunks)
        with Engine(model, plan) as engine:
            if chunks == (18, 20):
                start, size = engine.program.chunks(len(prompt))[-1]
                assert start + size > plan.capacity
            step = next(engine.generate([prompt], max_new_tokens=2, ignore_eos=True, return_logits=True))
            assert step.logits is not None
            logits.append(np.array(step.logits))
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)
