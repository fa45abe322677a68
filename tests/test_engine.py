"""The engine's own behaviour: teacher forcing, how rows end, refusals, reuse, and failures of a tier."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from engines import (
    GROUP,
    LAYERS,
    TRANSPORTS,
    Decoded,
    assert_same,
    decode,
    disks_through,
    layer_plan,
    prompts_of,
    resident_plan,
)

from swapkv_jax import Engine, Sampling, TierError, UsageError
from swapkv_jax.cache.dram import AliasLayerCache
from swapkv_jax.models import Model
from swapkv_jax.tiers import Syscalls

pytestmark = pytest.mark.usefixtures("shared_programs")

NEW = 10
LENGTHS = (5, 17)
POLICIES = ("resident", *TRANSPORTS)


@pytest.fixture(scope="module")
def reference(deep: Model) -> Decoded:
    with Engine(deep, resident_plan(deep, 2)) as engine:
        return decode(engine, prompts_of(*LENGTHS), NEW)


@pytest.fixture(scope="module", params=POLICIES)
def engine(
    request: pytest.FixtureRequest, deep: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    plan = resident_plan(deep, 2) if request.param == "resident" else layer_plan(deep, request.param, 2)
    with Engine(deep, plan, store_dir=tmp_path_factory.mktemp("store")) as engine:
        yield engine


# --- what a generation gives ---


def test_forced_tokens_are_taken(engine: Engine, reference: Decoded) -> None:
    """Forcing a text gives the logits it had; forcing another one gives its tokens, whatever the logits."""
    ours = [reference.row(row) for row in range(2)]
    assert_same(decode(engine, prompts_of(*LENGTHS), NEW, forced=ours), reference)
    other = [[7] * NEW, list(range(20, 20 + NEW))]
    decoded = decode(engine, prompts_of(*LENGTHS), NEW, forced=other)
    assert [decoded.row(row) for row in range(2)] == other
    assert np.array_equal(decoded.logits[0], reference.logits[0])
    assert not np.array_equal(decoded.logits[1], reference.logits[1])
    # A prompt that ends in the forced tokens continues as forcing them did.
    longer = [prompt + tokens[:4] for prompt, tokens in zip(prompts_of(*LENGTHS), other, strict=True)]
    continued = decode(engine, longer, 1)
    np.testing.assert_allclose(continued.logits[0], decoded.logits[4], atol=1e-4)
    assert_same(decode(engine, prompts_of(*LENGTHS), NEW), reference)  # and leaves nothing behind


def test_rows_end_for_their_own_reasons(engine: Engine, reference: Decoded) -> None:
    """Row 0 at an end-of-text token, row 1 by hand; a row that is done yields None."""
    stop = reference.row(0)[4]
    first = reference.row(0).index(stop)
    assert stop not in reference.row(1)[: first + 1]
    with patch.object(engine, "model", _with_eos(engine.model, stop)):
        generation = engine.generate(prompts_of(*LENGTHS), max_new_tokens=NEW)
        steps = []
        for step in generation:
            steps.append(step.tokens)
            assert step.logits is None
            if len(steps) == first + 3:
                assert generation.finish_reasons == ["stop", None]
                generation.finish_row(1, "a stop string")
                generation.finish_row(0, "too late: it is done")
    assert generation.finish_reasons == ["stop", "a stop string"]
    row = reference.row(1)
    assert steps == [[reference.row(0)[i] if i <= first else None, row[i]] for i in range(first + 3)]
    assert len(generation.step_s) == first + 2
    assert generation.ttft_s is not None


def _with_eos(model: Model, token: int) -> Model:
    return replace(model, eos_token_ids=frozenset({token}))


def test_length_and_ignored_eos(engine: Engine, reference: Decoded) -> None:
    with patch.object(engine, "model", _with_eos(engine.model, reference.row(0)[0])):
        generation = engine.generate(prompts_of(*LENGTHS), max_new_tokens=NEW, ignore_eos=True)
        assert [step.tokens for step in generation] == reference.tokens
        assert generation.finish_reasons == ["length", "length"]
        both = engine.generate(prompts_of(*LENGTHS), max_new_tokens=1)
        assert [step.tokens for step in both] == reference.tokens[:1]
        assert both.finish_reasons == ["stop", "length"]


def test_sampling_repeats_by_seed(engine: Engine, reference: Decoded) -> None:
    def drawn(seed: int) -> list[list[int | None]]:
        sampling = Sampling(temperature=1.5, top_k=50, top_p=0.9, seed=seed)
        return decode(engine, prompts_of(*LENGTHS), NEW, sampling=sampling).tokens

    first = drawn(1)
    assert first == drawn(1)
    assert first not in (reference.tokens, drawn(2))
    assert_same(decode(engine, prompts_of(*LENGTHS), NEW), reference)


def test_progress_of_prefill(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    next(engine.generate(prompts_of(*LENGTHS), max_new_tokens=2, on_prefill=lambda *at: seen.append(at)))
    assert seen == [(i + 1, 2 * LAYERS) for i in range(2 * LAYERS)]


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[5]], {}, "1 prompts for a plan of 2 rows"),
        ([[5], []], {}, "prompt 2 is empty"),
        ([[5], [304]], {}, "prompt 2 holds token ids outside 0 to 303"),
        ([[-1], [5]], {}, "prompt 1 holds token ids outside 0 to 303"),
        (
            [[5], [5] * 90],
            {"max_new_tokens": 7},
            "prompt 2 has 90 tokens: with 7 new ones that is over the limit of 96",
        ),
        ([[5], [5]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        (
            [[5], [5]],
            {"max_new_tokens": 3, "forced": [[1, 2, 3]]},
            "forced needs 3 tokens for each of 2 rows",
        ),
        ([[5], [5]], {"max_new_tokens": 3, "forced": [[1] * 3, [1] * 2]}, "forced needs 3 tokens"),
        (
            [[5], [5]],
            {"max_new_tokens": 1, "forced": [[1], [304]]},
            "forced tokens of row 2 are outside 0 to 303",
        ),
    ],
)
def test_what_is_refused(
    engine: Engine, reference: Decoded, prompts: list[list[int]], options: dict, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        engine.generate(prompts, **{"max_new_tokens": 4, **options})
    assert "\n" not in str(caught.value)
    assert_same(decode(engine, prompts_of(*LENGTHS), 2), _first(reference, 2))


def _first(decoded: Decoded, steps: int) -> Decoded:
    return Decoded(
        tokens=decoded.tokens[:steps],
        logits=decoded.logits[:steps],
        addresses=decoded.addresses[:steps],
        compiles=0,
    )


def test_a_context_can_be_filled(engine: Engine) -> None:
    """The last token of a full context is still decoded."""
    limit = engine.plan.max_context
    decoded = decode(engine, prompts_of(limit - 3, 1), 3)
    assert len(decoded.row(0)) == 3


def test_model_of_another_dtype(deep: Model) -> None:
    with pytest.raises(UsageError, match="the plan is for bfloat16, the model is in float32"):
        Engine(deep, resident_plan(deep, dtype="bfloat16"))


# --- one engine, many generations ---


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_abandoned_generation_leaves_the_engine_usable(
    engine: Engine, reference: Decoded, steps: int
) -> None:
    abandoned = engine.generate(prompts_of(33, 20), max_new_tokens=NEW)
    for _ in range(steps):
        next(abandoned)
    assert_same(decode(engine, prompts_of(*LENGTHS), NEW), reference)
    assert list(abandoned) == []  # closed: it cannot go on over the other's cache


def test_an_interrupted_prefill_leaves_the_engine_usable(engine: Engine, reference: Decoded) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == LAYERS + 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(engine.generate(prompts_of(33, 20), max_new_tokens=NEW, on_prefill=interrupt))
    assert_same(decode(engine, prompts_of(*LENGTHS), NEW), reference)


def test_the_pool_evicts_what_is_past_and_nothing_else(deep: Model, reference: Decoded) -> None:
    with Engine(deep, layer_plan(deep, "dram-alias", 2)) as engine:
        assert isinstance(engine._cache, AliasLayerCache)
        pool = engine._cache._pool
        rows: list[tuple[str, ...]] = []
        for lengths in ((33, 20), LENGTHS, (1, 2), LENGTHS):
            generation = engine.generate(prompts_of(*lengths), max_new_tokens=NEW, ignore_eos=True)
            tokens = []
            for step in generation:
                tokens.append(step.tokens)
                assert len(pool.active) == 2
                assert pool.past == ()
                assert pool.used == pool.capacity
            rows.append(pool.past)
            assert pool.active == ()
            assert pool.evictions == 2 * (len(rows) - 1)
            if lengths == LENGTHS:
                assert tokens == reference.tokens
        assert len(set(rows)) == len(rows)


def test_the_store_evicts_what_is_past_and_nothing_else(
    deep: Model, reference: Decoded, tmp_path: Path
) -> None:
    """Room for one and a half generations: each new one evicts some of the last."""
    plan = layer_plan(deep, "disk-alias", 2)
    need = plan.memory(deep.geometry).disk
    with Engine(deep, plan, store_dir=tmp_path, disk_limit=need) as engine:
        for lengths in ((80, 60), LENGTHS, (60, 80), LENGTHS):
            decoded = decode(engine, prompts_of(*lengths), NEW)
            if lengths == LENGTHS:
                assert_same(decoded, reference)
            assert engine.use.disk_used <= need
    assert list(tmp_path.glob("*.kv")) == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("when", ["unused", "running", "done"])
def test_close_is_idempotent(deep: Model, policy: str, when: str, tmp_path: Path) -> None:
    plan = resident_plan(deep, 2) if policy == "resident" else layer_plan(deep, policy, 2)
    engine = Engine(deep, plan, store_dir=tmp_path)
    generation = None
    if when != "unused":
        generation = engine.generate(prompts_of(*LENGTHS), max_new_tokens=3)
        next(generation)
    if generation is not None and when == "done":
        list(generation)
    engine.close()
    engine.close()
    assert list(tmp_path.glob("*.kv")) == []
    if generation is not None:
        assert list(generation) == []
    with pytest.raises(UsageError, match="the engine is closed; make a new one"):
        engine.generate(prompts_of(*LENGTHS))


# --- a disk that fails ---


class FailingDisk(Syscalls):
    """Reads or writes of records fail while `failing` says so."""

    failing: str | None = None
    after = 0  # calls that still succeed

    def _fails(self, verb: str) -> bool:
        if self.failing != verb:
            return False
        self.after -= 1
        return self.after < 0

    def read_at(self, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        if self._fails("read"):
            raise OSError(errno.EIO, "Input/output error")
        return super().read_at(descriptor, buffer, offset)

    def write_at(self, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        if self._fails("write"):
            raise OSError(errno.EIO, "Input/output error")
        return super().write_at(descriptor, buffer, offset)


@pytest.fixture
def disk() -> Iterator[FailingDisk]:
    syscalls = FailingDisk()
    with disks_through(syscalls):
        yield syscalls


@pytest.mark.parametrize("after", [0, 4, 30])
@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_failing_disk_reaches_the_caller(
    deep: Model, reference: Decoded, disk: FailingDisk, verb: str, after: int, tmp_path: Path
) -> None:
    """At once, within a layer's pieces, or steps later; a disk that has recovered serves the engine again."""
    with Engine(deep, layer_plan(deep, "disk-alias", 2), store_dir=tmp_path) as engine:
        disk.failing, disk.after = verb, 2 + after  # two headers are written first
        with pytest.raises(TierError) as caught:
            decode(engine, prompts_of(33, 50), 40)
        message = str(caught.value)
        assert f"cannot {verb}" in message
        assert str(tmp_path) in message
        assert f"errno {errno.EIO}" in message
        assert "\n" not in message
        disk.failing = None
        assert engine._cache._tier.store.active == ()  # type: ignore[attr-defined]
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), reference)
    assert list(tmp_path.glob("*.kv")) == []


@pytest.mark.parametrize("transport", ["disk-alias", "disk-copy"])
def test_a_damaged_record_is_never_decoded(
    deep: Model, reference: Decoded, transport: str, tmp_path: Path
) -> None:
    """Every stored value becomes NaN between two steps. None may reach a token, then or in the next run."""
    plan = layer_plan(deep, transport, 2)
    with Engine(deep, plan, store_dir=tmp_path) as engine:
        generation = engine.generate(prompts_of(33, 50), max_new_tokens=40, ignore_eos=True)
        for _ in range(2):
            next(generation)
        file = engine._cache._tier.files[0]  # type: ignore[attr-defined]
        with open(file.path, "r+b") as damaged:
            for layer in range(LAYERS):
                for run in file.runs(layer, 0, 33 // GROUP):
                    for group in range(run.groups):
                        damaged.seek(run.file_offset + group * file.stride)
                        damaged.write(np.full(plan.payload_bytes // 4, np.nan, np.float32).tobytes())
        with pytest.raises(TierError, match="damaged or was never written") as caught:
            list(generation)
        assert str(file.path) in str(caught.value)
        assert list(generation) == []
        assert_same(decode(engine, prompts_of(*LENGTHS), NEW), reference)
