"""Decode from a captured prefill is the ordinary decode, to the bit; a wrong or damaged capture is refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from engines import (
    CONTEXT,
    Decoded,
    assert_same,
    compile_once,
    decode,
    deep_model,
    layer_plan,
    prompts_of,
    resident_plan,
)

from swapkv_jax import Engine, Plan, TierError, UsageError, make_plan
from swapkv_jax.adapter import Adapter
from swapkv_jax.calibration import calibrate, default_text
from swapkv_jax.capture import CapturedPrefill, capture, capture_bytes
from swapkv_jax.models import Model
from swapkv_jax.prefilled import RandomPrefill
from swapkv_jax.selection import Selection

pytestmark = pytest.mark.usefixtures("shared_programs", "shared_captures")

NEW = 10
LENGTHS = (
    1,
    3,
    17,
    CONTEXT - NEW,
)  # ragged; 3 is less than a group, 86 is four chunks and reaches past the capacity
PROMPTS = prompts_of(*LENGTHS)
SELECTION = Selection(selected_groups=6, reuse_slots=7, rank=8, recent_groups=2, load_buckets=(4, 16))


def group_plan(model: Model) -> Plan:
    plan = resident_plan(model)
    return make_plan(
        model.geometry,
        cache="group",
        batch=len(LENGTHS),
        max_context=CONTEXT,
        group_tokens=plan.group_tokens,
        prefill_chunks=plan.prefill_chunks,
        record_alignment=512,
        selection=SELECTION,
    )


PLANS: dict[str, Callable[[Model], Plan]] = {
    "resident": lambda model: resident_plan(model, len(LENGTHS)),
    "dram-alias": lambda model: layer_plan(model, "dram-alias", len(LENGTHS)),
    "dram-copy": lambda model: layer_plan(model, "dram-copy", len(LENGTHS)),
    "disk-alias": lambda model: layer_plan(model, "disk-alias", len(LENGTHS)),
    "group": group_plan,
}


@pytest.fixture(scope="module")
def shared_captures() -> Iterator[None]:
    """Captures of the module share the graphs that do not differ."""
    with patch("swapkv_jax.capture.compile_program", compile_once):
        yield


@pytest.fixture(scope="module")
def adapter(deep: Model) -> Adapter:
    return calibrate(deep, default_text()[:40_000], tokens=512, window=128)


@pytest.fixture(scope="module")
def directory(deep: Model, shared_captures: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("captured") / "made on demand"
    capture(deep, PROMPTS, place, like=resident_plan(deep))
    return place


@pytest.mark.parametrize("policy", PLANS)
def test_a_captured_prefill_decodes_as_the_ordinary_one(
    deep: Model, adapter: Adapter, directory: Path, policy: str, tmp_path: Path
) -> None:
    captured = CapturedPrefill.open(directory, deep, PROMPTS)
    with Engine(deep, PLANS[policy](deep), store_dir=tmp_path, adapter=adapter) as engine:
        ordinary = decode(engine, PROMPTS, NEW)
        decode(engine, PROMPTS, NEW, prefilled=RandomPrefill(deep, PROMPTS))  # leaves nothing behind
        seen: list[tuple[int, int]] = []
        ours = decode(engine, PROMPTS, NEW, prefilled=captured, on_prefill=lambda *at: seen.append(at))
        assert_same(ours, ordinary)
        assert ours.compiles == 0
        assert all(step == ours.addresses[0] for step in ours.addresses)
        assert seen[-1] == (len(seen), len(LENGTHS) * deep.geometry.layers)
        assert_same(decode(engine, PROMPTS, NEW), ordinary)


def test_rows_can_be_selected(deep: Model, directory: Path) -> None:
    rows = [3, 0]
    captured = CapturedPrefill.open(directory, deep, PROMPTS).select(rows)
    chosen = [PROMPTS[row] for row in rows]
    with Engine(deep, resident_plan(deep, 2)) as engine:
        assert_same(decode(engine, chosen, NEW, prefilled=captured), decode(engine, chosen, NEW))
        with pytest.raises(UsageError, match="select its rows in the order of the prompts"):
            engine.generate(chosen[::-1], max_new_tokens=NEW, prefilled=captured)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(tmp_path: Path, dtype: str) -> None:
    """bfloat16 goes through .npy files as bits."""
    model = deep_model(tmp_path / "model", dtype)
    plan = resident_plan(model, len(LENGTHS))
    captured = capture(model, PROMPTS, tmp_path / "captured", like=plan)
    assert captured.hidden(0).dtype == captured.kv(0, 0)[0].dtype == np.dtype(dtype)
    with Engine(model, plan) as engine:
        assert_same(decode(engine, PROMPTS, NEW, prefilled=captured), decode(engine, PROMPTS, NEW))


def test_what_is_there_is_not_computed_again(deep: Model, directory: Path, tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []
    capture(deep, [*PROMPTS, PROMPTS[1]], directory, progress=lambda *at: seen.append(at))
    assert seen == []
    capture(deep, PROMPTS[:1], tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    capture(deep, PROMPTS[:3], tmp_path, progress=lambda *at: seen.append(at))
    layers = deep.geometry.layers
    assert seen == [("prefill (layers)", done, 2 * layers) for done in range(1, 2 * layers + 1)]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    planned = capture_bytes(deep.geometry, deep.dtype, map(len, PROMPTS[:3]))
    assert planned < size < planned + 9 * 256  # headers


def test_an_interrupted_capture_keeps_whole_prompts_only(deep: Model, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done == deep.geometry.layers + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(deep, PROMPTS[:2], tmp_path, progress=interrupt)
    assert len(list(tmp_path.iterdir())) == 3
    CapturedPrefill.open(tmp_path, deep, PROMPTS[:1])
    with pytest.raises(
        UsageError, match=r"no prefill of prompt 2 .*1 of 2 prompts are missing.*capture it first"
    ):
        CapturedPrefill.open(tmp_path, deep, PROMPTS[:2])


def test_another_model_or_other_prompts(deep: Model, directory: Path, tmp_path: Path) -> None:
    other = deep_model(tmp_path, "bfloat16")
    with pytest.raises(UsageError, match=r"holds no prefill of prompt 1 by .* in bfloat16"):
        CapturedPrefill.open(directory, other, PROMPTS)
    captured = CapturedPrefill.open(directory, deep, PROMPTS)
    with Engine(other, resident_plan(other, len(LENGTHS))) as engine:
        with pytest.raises(UsageError, match=r"is not by .* in bfloat16; capture it anew"):
            engine.generate(PROMPTS, max_new_tokens=NEW, prefilled=captured)
        for made_up in (RandomPrefill(deep, PROMPTS), RandomPrefill(other, PROMPTS[:1])):
            with pytest.raises(UsageError, match="other prompts or another model"):
                engine.generate(PROMPTS, max_new_tokens=NEW, prefilled=made_up)


@pytest.mark.parametrize("damage", ["cut", "emptied", "another's"])
def test_damaged_files(deep: Model, tmp_path: Path, damage: str) -> None:
    capture(deep, PROMPTS[1:2], tmp_path)
    (file,) = tmp_path.glob("*.k.npy")
    if damage == "another's":
        (tmp_path / file.name.replace(".k.", ".v.")).replace(file)
        capture(deep, PROMPTS[1:2], tmp_path / "again")
        for path in (tmp_path / "again").glob("*.v.npy"):
            path.replace(tmp_path / path.name)
    else:
        os.truncate(file, 0 if damage == "emptied" else file.stat().st_size - 1)
    with pytest.raises(TierError, match=rf"{file.name}.*delete it and capture again") as caught:
        capture(deep, PROMPTS[1:2], tmp_path)
    assert "\n" not in str(caught.value)


def test_places_that_cannot_work(deep: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=r"cannot make the capture directory .*choose another"):
        capture(deep, PROMPTS, file)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(TierError, match=r"100 bytes free, 4 captured prefills take \d+; make room"):
        capture(deep, PROMPTS, tmp_path / "small")
    monkeypatch.undo()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TierError, match=r"No space left on device \(errno 28\); make room"):
        capture(deep, PROMPTS[:1], tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "prompt 2 is empty"), ([304], "outside 0 to 303"), ([5] * 257, "use at most 256")],
)
def test_prompts_that_cannot_be_captured(deep: Model, tmp_path: Path, prompt: list[int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        capture(deep, [[5], prompt], tmp_path)


def test_random_prefill_is_the_same_under_every_exact_policy(deep: Model, tmp_path: Path) -> None:
    def decoded(policy: str) -> Decoded:
        with Engine(deep, PLANS[policy](deep), store_dir=tmp_path) as engine:
            return decode(engine, PROMPTS, NEW, prefilled=RandomPrefill(deep, PROMPTS))

    reference = decoded("resident")
    assert_same(decoded("dram-alias"), reference)
    assert_same(decoded("disk-alias"), reference)
