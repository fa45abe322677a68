"""A session that is taken up goes on with the tokens that an uninterrupted generation has, whatever the plans."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import (
    CONTEXT,
    Decoded,
    assert_same,
    decode,
    layer_plan,
    poison,
    prompts_of,
    resident_plan,
)

from swapkv_jax import Engine, Plan, Sampling, TierError, UsageError, make_plan
from swapkv_jax.adapter import Adapter
from swapkv_jax.calibration import calibrate, default_text
from swapkv_jax.generation import Step
from swapkv_jax.models import Model
from swapkv_jax.models.geometry import RopeScaling
from swapkv_jax.prefilled import RandomPrefill
from swapkv_jax.selection import Selection
from swapkv_jax.session_rows import check_sessions, identity_of
from swapkv_jax.sessions import SESSION_GROUP, SessionStore
from swapkv_jax.tiers import Syscalls

pytestmark = pytest.mark.usefixtures("shared_programs")

# Everything is selected, so that `group` is exact as well.
SELECTION = Selection(selected_groups=24, reuse_slots=24, rank=8, load_buckets=(4, 16))
PROMPT = prompts_of(41)[0]
NEW = 40  # past the session's first whole group of 64 tokens


def group_plan(model: Model, batch: int = 1) -> Plan:
    plan = resident_plan(model)
    return make_plan(
        model.geometry,
        cache="group",
        batch=batch,
        max_context=CONTEXT,
        group_tokens=plan.group_tokens,
        prefill_chunks=plan.prefill_chunks,
        record_alignment=512,
        selection=SELECTION,
        kv_dtype="float32",
    )


PLANS: dict[str, Callable[[Model, int], Plan]] = {
    "resident": resident_plan,
    "dram-alias": lambda model, batch: layer_plan(model, "dram-alias", batch),
    "dram-copy": lambda model, batch: layer_plan(model, "dram-copy", batch),
    "disk-alias": lambda model, batch: layer_plan(model, "disk-alias", batch),
    "disk-copy": lambda model, batch: layer_plan(model, "disk-copy", batch),
    "group": group_plan,
}


@pytest.fixture(scope="module")
def adapter(deep: Model) -> Adapter:
    return calibrate(deep, default_text()[:40_000], tokens=512, window=128)


@pytest.fixture
def engine_of(deep: Model, adapter: Adapter, tmp_path: Path) -> Callable[[str, int], Engine]:
    def make(policy: str, batch: int = 1) -> Engine:
        return Engine(deep, PLANS[policy](deep, batch), store_dir=tmp_path / "work", adapter=adapter)

    return make


@contextmanager
def sessions(model: Model, directory: Path, syscalls: Syscalls | None = None) -> Iterator[SessionStore]:
    store = SessionStore(directory, identity=identity_of(model), durability="group", syscalls=syscalls)
    try:
        yield store
    finally:
        store.close()


def logits_of(steps: Sequence[Step]) -> np.ndarray:
    """[T, B, V]"""
    return np.stack([step.logits for step in steps if step.logits is not None])


def go_on(
    engine: Engine, model: Model, directory: Path, name: str, new_tokens: int, **options: Any
) -> Decoded:
    """Decodes from a session's own tokens on, in a store opened for that alone."""
    with sessions(model, directory) as store, store.open(name) as session:
        return decode(engine, [session.tokens], new_tokens, sessions=[session], **options)


@pytest.mark.parametrize("policy", PLANS)
def test_an_interrupted_session_goes_on(
    deep: Model,
    engine_of: Callable[..., Engine],
    tmp_path: Path,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_of(policy) as engine:
        whole = decode(engine, [PROMPT], NEW)
        if policy != "group":
            poison(engine, monkeypatch)
        with sessions(deep, tmp_path) as store, store.open("talk", PROMPT[:-1]) as session:
            generation = engine.generate([PROMPT], max_new_tokens=NEW, ignore_eos=True, sessions=[session])
            first = [next(generation).tokens[0] for _ in range(30)]  # to token 71: a whole group and a tail
            generation.close()
            assert generation.reused_tokens == [0]
            assert session.stored == len(PROMPT) + 29 > SESSION_GROUP
        with sessions(deep, tmp_path) as store, store.open("talk") as session:
            assert session.tokens == [*PROMPT, *first]
            generation = engine.generate(
                [session.tokens], max_new_tokens=10, ignore_eos=True, return_logits=True, sessions=[session]
            )
            steps = list(generation)
            assert generation.reused_tokens == [len(PROMPT) + 29]
            assert generation.compiles_during_decode == 0
        ours = logits_of(steps)
        assert [*first, *(step.tokens[0] for step in steps)] == whole.row(0)
        assert np.abs(ours - whole.logits[30:]).max() <= (1e-4 if policy == "group" else 0)
        assert_same(
            go_on(engine, deep, tmp_path, "talk", 5), decode(engine, [[*PROMPT, *whole.row(0)]], 5), 1e-4
        )


def test_every_plan_takes_up_what_every_other_saved(
    deep: Model, engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    with engine_of("resident") as engine:
        whole = decode(engine, [PROMPT], NEW).row(0)
    tokens = PROMPT
    for count, policy in enumerate(PLANS, start=1):
        with (
            sessions(deep, tmp_path) as store,
            store.open("talk", PROMPT[:-1]) as session,
            engine_of(policy) as engine,
        ):
            tokens = session.tokens if count > 1 else PROMPT
            decode(engine, [tokens], 6, sessions=[session])
            assert session.tokens == [*PROMPT, *whole[: 6 * count]]


def test_one_more_turn(deep: Model, engine_of: Callable[..., Engine], tmp_path: Path) -> None:
    more = prompts_of(20)[0]
    with (
        engine_of("dram-alias") as engine,
        sessions(deep, tmp_path) as store,
        store.open("talk", PROMPT) as session,
    ):
        decode(engine, [PROMPT], 10, sessions=[session])
        tokens = [*session.tokens, *more]
        generation = engine.generate(
            [tokens], max_new_tokens=8, ignore_eos=True, return_logits=True, sessions=[session]
        )
        steps = list(generation)
        assert generation.reused_tokens == [len(PROMPT) + 9]
        assert session.stored == len(tokens) + 7
        fresh = decode(engine, [tokens], 8)
        assert [step.tokens for step in steps] == fresh.tokens
        assert np.abs(logits_of(steps) - fresh.logits).max() < 1e-4


def test_another_way_from_the_middle(deep: Model, engine_of: Callable[..., Engine], tmp_path: Path) -> None:
    """What the prompt does not have in common with the session is forgotten, in the middle of a stored group too."""
    with engine_of("resident") as engine:
        for name, common in (("a", 70), ("b", 50), ("c", 0)):
            with sessions(deep, tmp_path) as store, store.open(name, PROMPT[:-1]) as session:
                decode(engine, [PROMPT], 35, sessions=[session])
                tokens = [*session.tokens[:common], *prompts_of(5)[0]]
                assert tokens[common] != session.tokens[common]
                ours = decode(engine, [tokens], 9, sessions=[session])
                assert_same(ours, decode(engine, [tokens], 9), 1e-4)
            ours = go_on(engine, deep, tmp_path, name, 3)
            assert_same(ours, decode(engine, [[*tokens, *ours_tokens(engine, tokens, 9)]], 3), 1e-4)


def ours_tokens(engine: Engine, tokens: list[int], new_tokens: int) -> list[int]:
    return decode(engine, [tokens], new_tokens).row(0)


def test_rows_with_and_without_sessions(
    deep: Model, engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    prompts = prompts_of(41, 3, 66)
    with engine_of("disk-alias", 3) as engine, sessions(deep, tmp_path) as store:
        whole = decode(engine, prompts, 20)
        with store.open("one", prompts[0][:-1]) as one, store.open("three", prompts[2][:-1]) as three:
            assert_same(
                decode(engine, prompts, 12, sessions=[one, None, three], finish={2: 4}),
                cut(whole, 12, {2: 4}),
            )
            assert (one.stored, three.stored) == (41 + 11, 66 + 4)
            again = [one.tokens, [*prompts[1], *whole.row(1)[:12]], three.tokens]
            ours = decode(engine, again, 8, sessions=[one, None, three])
            assert ours.row(0) == whole.row(0)[12:]
            assert ours.row(1) == whole.row(1)[12:]
            assert ours.row(2) == whole.row(2)[5:13]


def cut(whole: Decoded, steps: int, finish: dict[int, int]) -> Decoded:
    tokens = [
        [None if step > finish.get(row, steps) else token for row, token in enumerate(tokens)]
        for step, tokens in enumerate(whole.tokens[:steps])
    ]
    return Decoded(tokens=tokens, logits=whole.logits[:steps], addresses=[], compiles=0)


def test_sampling_goes_on(deep: Model, engine_of: Callable[..., Engine], tmp_path: Path) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=7)
    with engine_of("resident") as engine:
        whole = decode(engine, [PROMPT], 20, sampling=sampling)
        with sessions(deep, tmp_path) as store, store.open("talk", PROMPT[:-1]) as session:
            decode(engine, [PROMPT], 8, sampling=sampling, sessions=[session])
        assert go_on(engine, deep, tmp_path, "talk", 12, sampling=sampling).row(0) == whole.row(0)[8:]


def test_a_failure_loses_what_was_not_committed_and_nothing_else(
    deep: Model, engine_of: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of("resident") as engine:
        whole = decode(engine, [PROMPT], NEW).row(0)
        with sessions(deep, tmp_path) as store, store.open("talk", PROMPT[:-1]) as session:
            generation = engine.generate([PROMPT], max_new_tokens=NEW, ignore_eos=True, sessions=[session])
            for _ in range(30):
                next(generation)

            def fail(*_: object) -> None:
                raise TierError("the disk is gone")

            monkeypatch.setattr(engine._cache, "step", fail)
            with pytest.raises(TierError, match="the disk is gone"):
                next(generation)
            monkeypatch.undo()
        with sessions(deep, tmp_path) as store, store.open("talk") as session:
            assert session.stored == SESSION_GROUP
            assert session.tokens == [*PROMPT, *whole][: SESSION_GROUP + 1]
            done = len(session.tokens) - len(PROMPT)
            assert decode(engine, [session.tokens], NEW - done, sessions=[session]).row(0) == whole[done:]


def test_a_disk_that_fills_up_in_decode_keeps_what_is_committed(deep: Model, tmp_path: Path) -> None:
    """There is room for the prompt's whole group and none for the next one."""
    prompt, new = prompts_of(65)[0], 80
    with Engine(deep, resident_plan(deep, max_context=2 * CONTEXT)) as engine:
        whole = decode(engine, [prompt], new).row(0)
        disk = FullDisk()
        with sessions(deep, tmp_path, disk) as store, store.open("talk", prompt[:-1]) as session:
            generation = engine.generate([prompt], max_new_tokens=new, ignore_eos=True, sessions=[session])
            next(generation)
            disk.full = True
            with pytest.raises(TierError, match="No space left"):
                list(generation)
            disk.full = False
        with sessions(deep, tmp_path) as store, store.open("talk") as session:
            assert session.tokens == prompt
            assert decode(engine, [session.tokens], new, sessions=[session]).row(0) == whole


class FullDisk(Syscalls):
    """A disk that takes nothing more once it is `full`."""

    full = False

    def reserve(self, descriptor: int, offset: int, length: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().reserve(descriptor, offset, length)

    def write_at(self, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write_at(descriptor, buffer, offset)


def test_new_sessions_share_whole_groups(
    deep: Model, engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    prompt = prompts_of(80)[0]
    other = [*prompt[:70], *prompts_of(9)[0]]
    with engine_of("resident") as engine, sessions(deep, tmp_path) as store:
        with store.open("first", prompt[:-1]) as session:
            decode(engine, [prompt], 5, sessions=[session])
        with store.open("second", other[:-1]) as session:
            generation = engine.generate(
                [other], max_new_tokens=5, ignore_eos=True, return_logits=True, sessions=[session]
            )
            steps = list(generation)
        assert generation.reused_tokens == [SESSION_GROUP]
        fresh = decode(engine, [other], 5)
        assert [step.tokens for step in steps] == fresh.tokens
        assert np.abs(logits_of(steps) - fresh.logits).max() < 1e-4


def test_what_cannot_be_continued_is_refused(
    deep: Model, engine_of: Callable[..., Engine], tmp_path: Path
) -> None:
    prompts = prompts_of(5, 6)
    with engine_of("resident") as engine, sessions(deep, tmp_path) as store, store.open("a") as session:
        with pytest.raises(UsageError, match="2 sessions for 1 prompts"):
            engine.generate(prompts[:1], max_new_tokens=2, sessions=[session, None])
        prefilled = RandomPrefill(deep, prompts[:1])
        with pytest.raises(UsageError, match="leave `prefilled` out"):
            engine.generate(prompts[:1], max_new_tokens=2, sessions=[session], prefilled=prefilled)
        with pytest.raises(UsageError, match="fork it"):
            check_sessions([session, session], prompts, deep)
        scaling = RopeScaling(kind="dynamic", factor=2.0, original_max_positions=64)
        dynamic = replace(deep, geometry=replace(deep.geometry, rope_scaling=scaling))
        with pytest.raises(UsageError, match="dynamic RoPE"):
            check_sessions([session, None], prompts, dynamic)
