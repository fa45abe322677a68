"""Policy `layer` gives what `resident` gives, from any tier over any transport, with any ring of slots.

Where capacities agree the graphs that decode are the same, so logits are compared by their bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import (
    CONTEXT,
    GROUP,
    LAYERS,
    STAGED_GROUPS,
    TRANSPORTS,
    Decoded,
    assert_same,
    decode,
    deep_model,
    layer_plan,
    poison,
    prompts_of,
    resident_plan,
)

from swapkv_jax import Engine, make_plan
from swapkv_jax.models import Model

pytestmark = pytest.mark.usefixtures("shared_programs")

NEW = 14  # over three groups and one staging piece
PIECE = GROUP * STAGED_GROUPS
LENGTHS = (1, GROUP - 1, GROUP, GROUP + 1, PIECE - 1, PIECE + 1, CONTEXT - NEW)
RAGGED = ((1, GROUP - 1, GROUP, GROUP + 1), (CONTEXT - NEW, 2, PIECE - 1, 37))
Reference = Callable[[tuple[int, ...]], Decoded]


@pytest.fixture(scope="module")
def reference(deep: Model) -> Iterator[Reference]:
    """What `resident` decodes after prompts of such lengths."""
    engines: dict[int, Engine] = {}
    known: dict[tuple[int, ...], Decoded] = {}

    def of(lengths: tuple[int, ...]) -> Decoded:
        batch = len(lengths)
        if batch not in engines:
            engines[batch] = Engine(deep, resident_plan(deep, batch))
        if lengths not in known:
            known[lengths] = decode(engines[batch], prompts_of(*lengths), NEW)
        return known[lengths]

    yield of
    for engine in engines.values():
        engine.close()


@pytest.fixture(
    scope="module",
    params=itertools.product((1, 4), (2, 3, 5, LAYERS), TRANSPORTS),
    ids=lambda case: f"batch{case[0]}-physical{case[1]}-{case[2]}",
)
def engine(
    request: pytest.FixtureRequest, deep: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    batch, physical, transport = request.param
    plan = layer_plan(deep, transport, batch, physical_layers=physical)
    assert plan.capacity == CONTEXT
    with Engine(deep, plan, store_dir=tmp_path_factory.mktemp("store")) as engine:
        yield engine


def cases(engine: Engine) -> list[tuple[int, ...]]:
    return [(n,) for n in LENGTHS] if engine.plan.batch == 1 else list(RAGGED)


def test_tokens_and_logits(engine: Engine, reference: Reference) -> None:
    for lengths in cases(engine):
        assert_same(decode(engine, prompts_of(*lengths), NEW), reference(lengths))


def test_poison_changes_nothing(
    engine: Engine, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(engine, monkeypatch)
    for lengths in cases(engine)[-2:]:
        assert_same(decode(engine, prompts_of(*lengths), NEW), reference(lengths))


def test_nothing_compiles_or_moves(engine: Engine, reference: Reference) -> None:
    """Not in a second generation either, nor when rows end early; the others' tokens stay the same."""
    for lengths in cases(engine)[-2:]:
        finish = {1: 3, 3: 6} if engine.plan.batch == 4 else {}
        decoded = decode(engine, prompts_of(*lengths), NEW, finish=finish)
        assert decoded.compiles == 0
        assert all(addresses == decoded.addresses[0] for addresses in decoded.addresses)
        expected = reference(lengths)
        for row in range(len(lengths)):
            assert decoded.row(row) == expected.row(row)[: finish.get(row, NEW) + 1]


def test_resident_survives_poison(deep: Model, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(deep, resident_plan(deep, 4)) as engine:
        for lengths in RAGGED:
            poison(engine, monkeypatch)
            decoded = decode(engine, prompts_of(*lengths), NEW)
            assert_same(decoded, reference(lengths))
            assert decoded.compiles == 0
            assert all(addresses == decoded.addresses[0] for addresses in decoded.addresses)


@pytest.mark.parametrize("segment", [3, LAYERS])
def test_segments_of_any_length(deep: Model, segment: int, reference: Reference) -> None:
    with Engine(deep, resident_plan(deep, 4, layers_per_segment=segment)) as engine:
        assert engine.plan.segments == -(-LAYERS // segment)
        assert_same(decode(engine, prompts_of(*RAGGED[1]), NEW), reference(RAGGED[1]), 1e-4)


def test_a_row_is_what_it_is_alone(reference: Reference) -> None:
    """Row by row the ragged batch repeats what each prompt gives in a batch of one."""
    for row, length in enumerate(RAGGED[0]):
        alone = reference((length,))
        assert reference(RAGGED[0]).row(row) == alone.row(0)
        np.testing.assert_allclose(reference(RAGGED[0]).logits[:, row], alone.logits[:, 0], atol=1e-4)


@pytest.mark.parametrize("chunks", [(5,), (18, 20), (500,)])
def test_prefill_chunks_do_not_matter(deep: Model, chunks: tuple[int, ...], reference: Reference) -> None:
    """Chunks that divide nothing, that reach past the capacity, and one that is longer than it."""
    with Engine(deep, resident_plan(deep, prefill_chunks=chunks)) as engine:
        for lengths in ((1,), (PIECE + 1,), (CONTEXT - NEW,)):
            assert_same(decode(engine, prompts_of(*lengths), NEW), reference(lengths), 1e-4)


@pytest.mark.parametrize("policy", ["resident", "dram-alias"])
def test_prefill_writes_the_prompt_alone(deep: Model, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resident_plan(deep) if policy == "resident" else layer_plan(deep, policy)
    with Engine(deep, plan) as engine:
        poison(engine, monkeypatch)
        length = CONTEXT - NEW
        next(engine.generate(prompts_of(length), max_new_tokens=NEW))
        keys = engine._cache._k  # type: ignore[attr-defined]
        assert len(keys) == LAYERS
        for k in keys:
            unwritten = np.isnan(np.asarray(k)[0]).all(axis=(0, 1))
            assert unwritten.tolist() == [False] * length + [True] * NEW


@pytest.mark.parametrize("transport", ["dram-alias", "dram-copy"])
def test_a_row_that_is_done_writes_nothing(
    deep: Model, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 1 ends after its third token, which is therefore not in the cache; row 0 goes on."""
    with Engine(deep, layer_plan(deep, transport, 2)) as engine:
        poison(engine, monkeypatch)
        generation = engine.generate(prompts_of(5, 9), max_new_tokens=8, ignore_eos=True)
        next(generation)
        keys = list(engine._cache._k)  # type: ignore[attr-defined]
        for step, _ in enumerate(generation, start=1):
            if step == 2:
                generation.finish_row(1, "by hand")
        assert len(keys) == LAYERS
        for k in keys:
            held = (~np.isnan(k).all(axis=(1, 2))).sum(axis=-1)
            assert held.tolist() == [5 + 7, 9 + 2]


@pytest.mark.parametrize("transport", ["dram-alias", "disk-copy"])
def test_capacities_that_differ(deep: Model, transport: str, tmp_path: Path, reference: Reference) -> None:
    """A context that fills neither pages nor pieces: each tier rounds it up in its own way."""
    plan = layer_plan(deep, transport, 4, max_context=53, group_tokens=5)
    assert plan.capacity > 53
    lengths = (1, 39, 4, 15)
    with Engine(deep, resident_plan(deep, 4)) as engine:
        expected = decode(engine, prompts_of(*lengths), NEW)
    with Engine(deep, plan, store_dir=tmp_path) as engine:
        assert_same(decode(engine, prompts_of(*lengths), NEW), expected, 1e-4)


@pytest.mark.parametrize(
    ("dtype", "error_limit", "transports"),
    [("bfloat16", 0.05, ("dram-alias", "disk-copy")), ("float16", 0.006, ("dram-copy", "disk-alias"))],
)
def test_half_precision(
    dtype: str,
    error_limit: float,
    transports: tuple[str, ...],
    tmp_path: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bits as `resident` in that dtype, poisoned too, and near float32's on its own tokens."""
    model = deep_model(tmp_path / "model", dtype)
    lengths, context = RAGGED[1], 192  # the pool's pages hold 64 tokens of two-byte values
    with Engine(model, resident_plan(model, 4, max_context=context)) as engine:
        expected = decode(engine, prompts_of(*lengths), NEW)
        theirs = reference(lengths)
        forced = [theirs.row(row) for row in range(4)]
        near = decode(engine, prompts_of(*lengths), NEW, forced=forced).logits
        error = np.sqrt(np.mean((near - theirs.logits) ** 2) / np.mean(theirs.logits**2))
        assert 0 < error < error_limit
    for transport in transports:
        plan = layer_plan(model, transport, 4, max_context=context)
        with Engine(model, plan, store_dir=tmp_path / "store") as engine:
            assert_same(decode(engine, prompts_of(*lengths), NEW), expected)
            poison(engine, monkeypatch)
            assert_same(decode(engine, prompts_of(*lengths), NEW), expected)


@pytest.mark.parametrize(
    ("length", "transport"),
    [
        (700, "dram-alias"),
        (700, "disk-alias"),
        *(pytest.param(4100, transport, marks=pytest.mark.slow) for transport in TRANSPORTS),
    ],
)
def test_real_model(smollm2: Model, length: int, transport: str, tmp_path: Path) -> None:
    """SmolLM2 with the sizes a user gets: the planner's own group, pieces and chunks."""
    prompt = [np.random.default_rng(1).integers(20, 40000, length).tolist()]
    context = -(-(length + 8) // 512) * 512
    fields: dict[str, Any] = TRANSPORTS[transport]
    runs = []
    for plan in (
        make_plan(smollm2.geometry, cache="resident", max_context=context),
        make_plan(smollm2.geometry, cache="layer", max_context=context, **fields),
    ):
        with Engine(smollm2, plan, store_dir=tmp_path) as engine:
            runs.append(decode(engine, prompt, 6))
    assert_same(runs[1], runs[0], 1e-4)
