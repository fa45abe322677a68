"""Calibration against `np.linalg.svd` of the keys themselves, and against RoPE written out by hand."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from engines import compile_once
from tiny import tiny_checkpoint, tiny_config, tiny_tensors

from swapkv_jax import Engine, ModelError, Plan, Sampling, UsageError, calibration, load_model, make_plan
from swapkv_jax.adapter import Adapter, adapter_directory, digest_text
from swapkv_jax.calibration import calibrate, calibrate_all, default_text, ensure_adapter, ensure_adapters
from swapkv_jax.models import Geometry, Model
from swapkv_jax.program import Program
from swapkv_jax.staging import host_view

TEXT = default_text()[:4000]
TOKENS, WINDOW, CHUNK = 350, 150, 64  # two whole windows and 50 tokens


@pytest.fixture(scope="module", autouse=True)
def _shared_programs() -> Iterator[None]:
    """Compiling is nearly all the time: contexts of one capacity share their graphs, the engine's too, and
    chunks of one size are enough to make windows of several."""

    def compile_shared(plan: Plan, geometry: Geometry, sampling: Sampling) -> Program:
        alike = msgspec.structs.replace(plan, max_context=plan.capacity, prefill_chunks=(CHUNK,))
        shared = compile_once(alike, geometry, sampling)
        return replace(shared, plan=plan)

    with (
        patch.object(calibration, "compile_program", compile_shared),
        patch("swapkv_jax.engine.compile_program", compile_shared),
    ):
        yield


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    def load(name: str, dtype: str = "float32") -> Model:
        return load_model(str(tiny_checkpoint(name, tmp_path_factory.mktemp(name))), dtype=dtype)

    return load


@pytest.fixture(scope="module")
def llama(load: Callable[..., Model]) -> Model:
    return load("llama")


def cut(model: Model, tokens: int = TOKENS, window: int = WINDOW) -> list[list[int]]:
    ids = model.tokenizer.encode(TEXT, chat=False)[:tokens]
    return [ids[i : i + window] for i in range(0, len(ids), window)]


def engine_keys(model: Model, windows: list[list[int]]) -> np.ndarray:
    """float64 [L, T, N]: what the engine's own cache holds after the prefill of each window as a prompt."""
    plan = make_plan(
        model.geometry, cache="resident", max_context=len(windows[0]) + 1, dtype=model.dtype  # type: ignore[arg-type]
    )  # fmt: skip
    parts = []
    with Engine(model, plan) as engine:
        for ids in windows:
            next(engine.generate([ids], max_new_tokens=1))
            cache: Any = engine._cache
            keys = np.stack([host_view(k)[0, :, :, : len(ids)] for k in cache._k])  # [L, Hkv, D, T]
            parts.append(keys.reshape(len(keys), -1, len(ids)).astype(np.float64).transpose(0, 2, 1))
    return np.concatenate(parts, axis=1)


def assert_is_svd(adapter: Adapter, keys: np.ndarray) -> None:
    """Equal singular values; equal subspaces at every rank where the spectrum leaves no doubt which it is."""
    for vectors, spectrum, k in zip(adapter.vectors.astype(np.float64), adapter.spectrum, keys, strict=True):
        _, singular, right = np.linalg.svd(k, full_matrices=False)
        np.testing.assert_allclose(spectrum, singular**2, rtol=1e-6, atol=1e-9 * singular[0] ** 2)
        np.testing.assert_allclose(vectors.T @ vectors, np.eye(vectors.shape[1]), atol=1e-5)
        clear = 0
        for rank in range(1, vectors.shape[1]):
            if singular[rank] ** 2 < 0.98 * singular[rank - 1] ** 2:
                clear += 1
                ours, theirs = vectors[:, :rank], right[:rank].T
                # All principal angles are zero: insensitive to signs and to rotations within the subspace.
                cosines = np.linalg.svd(ours.T @ theirs, compute_uv=False)
                np.testing.assert_allclose(cosines, 1, atol=1e-6)
        assert clear > vectors.shape[1] // 3


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"), ("qwen3", "float32"), ("llama-dynamic", "float32"),
     ("llama-bf16", "bfloat16")],
)  # fmt: skip
def test_adapter_is_the_svd_of_the_engines_keys(load: Callable[..., Model], name: str, dtype: str) -> None:
    model = load(name, dtype)
    adapter = calibrate(model, TEXT, tokens=TOKENS, window=WINDOW)
    size = model.geometry.kv_heads * model.geometry.head_dim
    assert adapter.vectors.shape == (model.geometry.layers, size, size)
    assert (adapter.tokens, adapter.fingerprint) == (TOKENS, model.fingerprint)
    assert adapter.text_digest == digest_text(TEXT)
    assert_is_svd(adapter, engine_keys(model, cut(model)))


def means(keys: np.ndarray, windows: list[list[int]], place_tokens: int) -> np.ndarray:
    """[L, P, N]: the mean keys of adjacent tokens, which no window shares with the next."""
    ends = np.cumsum([len(ids) for ids in windows])[:-1]
    parts = []
    for window in np.split(keys, ends, axis=1):
        places = window.shape[1] // place_tokens
        whole = window[:, : places * place_tokens]
        parts.append(whole.reshape(len(keys), places, place_tokens, keys.shape[2]).mean(axis=2))
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("place_tokens", [4, 7])  # both leave tokens over
def test_adapter_of_groups_is_the_svd_of_their_mean_keys(llama: Model, place_tokens: int) -> None:
    windows = cut(llama)
    adapter = calibrate(llama, TEXT, tokens=TOKENS, window=WINDOW, place_tokens=place_tokens)
    assert (adapter.tokens, adapter.place_tokens) == (TOKENS, place_tokens)
    assert_is_svd(adapter, means(engine_keys(llama, windows), windows, place_tokens))


def test_adapters_of_one_prefill_are_those_of_a_prefill_each(llama: Model) -> None:
    options: dict[str, Any] = {"tokens": TOKENS, "window": WINDOW, "rank": 5}
    for place_tokens, adapter in zip(
        (1, 4, 7), calibrate_all(llama, TEXT, (1, 4, 7), **options), strict=True
    ):
        alone = calibrate(llama, TEXT, place_tokens=place_tokens, **options)
        assert adapter.place_tokens == place_tokens
        np.testing.assert_array_equal(adapter.spectrum, alone.spectrum)
        np.testing.assert_array_equal(adapter.vectors, alone.vectors)


def first_keys(name: str, windows: list[list[int]], rotate: bool) -> np.ndarray:
    """float64 [T, N]: the first layer's keys by hand, from the checkpoint's own tensors."""
    config, tensors = tiny_config(name), tiny_tensors(name)
    layer, eps = "model.layers.0", config["rms_norm_eps"]

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * scale

    parts = []
    for ids in windows:
        x = norm(
            tensors["model.embed_tokens.weight"][ids].astype(np.float64),
            tensors[f"{layer}.input_layernorm.weight"],
        )
        k = x @ tensors[f"{layer}.self_attn.k_proj.weight"].T + tensors.get(
            f"{layer}.self_attn.k_proj.bias", 0
        )
        k = k.reshape(len(ids), config["num_key_value_heads"], -1)  # [T, Hkv, D]
        if f"{layer}.self_attn.k_norm.weight" in tensors:
            k = norm(k, tensors[f"{layer}.self_attn.k_norm.weight"])
        if rotate:
            half = k.shape[-1] // 2
            angles = np.arange(len(ids))[:, None] * config["rope_theta"] ** (-np.arange(half) / half)
            pairs = (k[..., :half] + 1j * k[..., half:]) * np.exp(1j * angles)[:, None]
            k = np.concatenate([pairs.real, pairs.imag], axis=-1)
        parts.append(k.reshape(len(ids), -1))
    return np.concatenate(parts)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])  # a bias; a key norm
def test_keys_are_rotated_from_zero_in_every_window(load: Callable[..., Model], name: str) -> None:
    model = load(name)
    spectrum = calibrate(model, TEXT, tokens=TOKENS, window=WINDOW).spectrum[0]
    windows = cut(model)

    def squares(windows: list[list[int]], rotate: bool) -> np.ndarray:
        return np.linalg.svd(first_keys(name, windows, rotate), compute_uv=False) ** 2

    np.testing.assert_allclose(spectrum, squares(windows, rotate=True), rtol=1e-4, atol=1e-5 * spectrum[0])
    for other in (
        squares(windows, rotate=False),
        squares([[i for ids in windows for i in ids]], rotate=True),
    ):
        assert np.abs(other / spectrum - 1).max() > 0.05


def test_rank_keeps_the_same_first_vectors(llama: Model) -> None:
    full = calibrate(llama, TEXT, tokens=TOKENS, window=WINDOW)
    low = calibrate(llama, TEXT, tokens=TOKENS, window=WINDOW, rank=5)
    assert np.array_equal(low.vectors, full.slice(5).vectors)
    assert np.array_equal(low.spectrum, full.spectrum)
    keys = engine_keys(llama, cut(llama))
    projected = keys @ low.vectors.astype(np.float64)
    share = (projected**2).sum(axis=(1, 2)) / (keys**2).sum(axis=(1, 2))
    np.testing.assert_allclose(low.variance_kept(5), share, rtol=1e-5)


def test_windows_are_cut_to_the_model_and_progress_is_whole(llama: Model) -> None:
    calls: list[tuple[str, int, int]] = []
    whole = calibrate(llama, TEXT, tokens=600, window=100_000, progress=lambda *call: calls.append(call))
    limit = llama.geometry.context_limit
    assert np.array_equal(whole.spectrum, calibrate(llama, TEXT, tokens=600, window=limit).spectrum)
    total = -(-600 // limit) * llama.geometry.layers
    assert [call[1:] for call in calls] == [(i + 1, total) for i in range(total)]


def test_a_short_text_is_used_whole(llama: Model) -> None:
    text = TEXT[:300]
    length = len(llama.tokenizer.encode(text, chat=False))
    assert calibrate(llama, text, window=WINDOW).tokens == length < TOKENS


def test_few_tokens_per_character_are_still_found(llama: Model) -> None:
    """Tokenising no more than is needed must not lose tokens where a token is many characters."""
    text = "<|assistant|>" * 20 + TEXT[:1000]
    with patch.object(calibration, "_CHARACTERS_PER_TOKEN", 1):
        assert calibrate(llama, text, tokens=WINDOW, window=WINDOW).tokens == WINDOW


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank 0 .*use 1 to 32"),
        ({"rank": 33}, "rank 33 .*use 1 to 32"),
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"window": 0}, "windows of 0 tokens cannot be cut into places of 1"),
        ({"place_tokens": 0}, "cut into places of 0; use at least 1 of each"),
        ({"window": 7, "place_tokens": 8}, "windows of 7 .* into places of 8; .* no shorter than places"),
        ({"tokens": 127, "place_tokens": 4}, "127 tokens .*cannot fill 32 dimensions"),
        ({"tokens": 31}, "31 tokens .*cannot fill 32 dimensions"),
    ],
)
def test_refuses_numbers_that_cannot_work(llama: Model, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        calibrate(llama, TEXT, **options)  # type: ignore[arg-type]


def test_refuses_an_empty_text(llama: Model) -> None:
    with pytest.raises(UsageError, match="longer text"):
        calibrate(llama, "")


def test_keys_out_of_range_are_refused(load: Callable[..., Model]) -> None:
    model = load("llama-bf16", "bfloat16")
    model.params["layers"][2]["input_norm"]["scale"][...] = 3e38
    with pytest.raises(ModelError, match="layer 2: keys are all zero or not finite in bfloat16"):
        calibrate(model, TEXT, tokens=WINDOW, window=WINDOW)


def test_default_text_is_long_english(llama: Model) -> None:
    text = default_text()
    assert len(text) > 300_000
    assert sum(text.count(word) for word in (" the ", " of ", " is ")) > 5_000
    assert text == default_text()


# ---- ensure_adapter -------------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "default_text", lambda: TEXT)
    return tmp_path


def test_ensure_calibrates_once(llama: Model, cache: Path) -> None:
    first, note = ensure_adapter(llama)
    assert note.startswith(
        f"adapter: calibrated on {first.tokens} tokens of the default text (none was saved)"
    )
    with patch.object(calibration, "calibrate", side_effect=AssertionError("calibrated again")):
        second, note = ensure_adapter(llama)
        assert ensure_adapter(llama, text=TEXT)[0].tokens == first.tokens
    assert note.startswith(f"adapter: loaded from {adapter_directory(llama.fingerprint, 1)}")
    assert np.array_equal(second.vectors, first.vectors)


def test_ensure_several_calibrates_only_what_is_missing(llama: Model, cache: Path) -> None:
    kept, _ = ensure_adapter(llama, place_tokens=4)
    found, note = ensure_adapters(llama, [8, 4, 2])
    assert note.endswith("calibrated now: 2, 8")
    assert np.array_equal(found[4].vectors, kept.vectors)
    with patch.object(calibration, "calibrate_all", side_effect=AssertionError):
        again, note = ensure_adapters(llama, [2, 4, 8])
    assert note.endswith("calibrated now: none")
    assert sorted(again) == [2, 4, 8]
    assert np.array_equal(ensure_adapter(llama, place_tokens=8)[0].vectors, found[8].vectors)


def test_ensure_keeps_adapters_for_tokens_and_for_groups_apart(
    llama: Model, cache: Path, tmp_path: Path
) -> None:
    tokens, groups = ensure_adapter(llama)[0], ensure_adapter(llama, place_tokens=4)[0]
    assert (tokens.place_tokens, groups.place_tokens) == (1, 4)
    assert not np.array_equal(tokens.vectors, groups.vectors)
    with patch.object(calibration, "calibrate", side_effect=AssertionError("calibrated again")):
        for adapter in (tokens, groups):
            again, _ = ensure_adapter(llama, place_tokens=adapter.place_tokens)
            assert np.array_equal(again.vectors, adapter.vectors)
    place = tmp_path / "mine"
    tokens.save(place)
    adapter, note = ensure_adapter(llama, place_tokens=4, directory=place)
    assert "(the saved one was for means of 1 tokens)" in note
    assert np.array_equal(adapter.vectors, groups.vectors)


def test_ensure_follows_the_text_asked_for(llama: Model, cache: Path, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    ensure_adapter(llama, directory=place, text=TEXT)
    adapter, note = ensure_adapter(llama, directory=place, text=TEXT[:3000])
    assert adapter.text_digest == digest_text(TEXT[:3000])
    assert "of the given text (the saved one was of another text)" in note
    assert ensure_adapter(llama, directory=place)[0].text_digest == adapter.text_digest
    assert not adapter_directory(llama.fingerprint, 1).exists()


def test_ensure_replaces_a_damaged_adapter_only_in_the_cache(
    llama: Model, cache: Path, tmp_path: Path
) -> None:
    for place in (adapter_directory(llama.fingerprint, 1), tmp_path / "mine"):
        place.mkdir(parents=True)
        (place / "adapter.json").write_text("{")
    _, note = ensure_adapter(llama)
    assert "was of no use" in note
    assert "damaged" in note
    with pytest.raises(ModelError, match="damaged adapter"):
        ensure_adapter(llama, directory=tmp_path / "mine")


def test_ensure_refuses_another_models_directory(llama: Model, cache: Path, tmp_path: Path) -> None:
    ensure_adapter(llama, directory=tmp_path / "mine")
    other = replace(llama, fingerprint="f" * 32)
    with pytest.raises(ModelError, match="fingerprint"):
        ensure_adapter(other, directory=tmp_path / "mine")


def test_ensure_says_so_before_it_computes_for_nothing(llama: Model, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with patch.object(calibration, "calibrate", side_effect=AssertionError("calibrated")):
        with pytest.raises(ModelError, match=str(tmp_path / "file")):
            ensure_adapter(llama, directory=tmp_path / "file" / "below")


def test_ensure_waits_for_another_process(llama: Model, cache: Path, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    ready = calibrate(llama, TEXT, tokens=TOKENS, window=WINDOW)
    ready.save(tmp_path / "ready")
    code = (
        "import sys, shutil, time; from pathlib import Path; from swapkv_jax.calibration import _calibrating\n"
        "source, place = map(Path, sys.argv[1:])\n"
        "with _calibrating(place):\n"
        "    print('locked', flush=True); time.sleep(0.5)\n"
        "    shutil.copytree(source, place, dirs_exist_ok=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "ready"), str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with patch.object(calibration, "calibrate", side_effect=AssertionError("calibrated too")):
            _, note = ensure_adapter(llama, directory=place)
    assert note.startswith("adapter: loaded")


# ---- tools/calibrate.py ---------------------------------------------------------------------------------


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    tool = importlib.import_module("calibrate")
    checkpoint = tiny_checkpoint("llama", cache / "model")

    def run(*flags: str) -> tuple[int, str, str]:
        try:
            code = tool.main(["--model", str(checkpoint), *flags])
        except SystemExit as stop:
            code = int(stop.code or 0)
        text = capsys.readouterr()
        return code, text.out, text.err

    return run


def test_tool(run: Callable[..., tuple[int, str, str]], llama: Model, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "kept.json"
    text.write_text(TEXT, encoding="utf-8")
    flags = ["--text", str(text), "--tokens", "350", "--window", "150", "--rank", "20", "--json", str(out)]
    code, table, said = run(*flags, "--verbose")
    assert code == 0
    adapter = Adapter.load(adapter_directory(llama.fingerprint, 4), llama.fingerprint)
    reference = calibrate(llama, TEXT, tokens=350, window=150, rank=20, place_tokens=4)
    assert np.array_equal(adapter.vectors, reference.vectors)
    report = json.loads(out.read_text())
    assert report["group_tokens"] == adapter.place_tokens == 4
    assert report["variance_kept"]["12"] == reference.variance_kept(12).tolist()
    assert list(report["variance_kept"]) == ["8", "12", "16", "24", "32"]  # keys have 32 dimensions
    rows = {line[:17].strip(): line[17:].split() for line in table.splitlines()}
    assert rows["min"][2] == f"{100 * reference.variance_kept(16).min():.2f}"
    assert rows["layer 3"][0] == f"{100 * reference.variance_kept(8)[3]:.2f}"
    assert rows["max"][-1] == "100.00"
    assert "calibrate (layers)" in said
    assert "350 tokens, in mean keys of 4," in said


def test_tool_saves_where_it_is_told(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, table, said = run(
        *("--tokens", "150", "--dtype", "bfloat16", "--group-tokens", "1"),
        *("--out", str(tmp_path / "out"), "--quiet"),
    )
    assert (code, said) == (0, "")
    assert "layer" not in table
    assert json.loads((tmp_path / "out" / "adapter.json").read_text())["place_tokens"] == 1
    assert not (tmp_path / "swapkv_jax").exists()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--rank", "99"], 2, "use 1 to 32"),
        (["--text", "no/such/file"], 2, "cannot read the text no/such/file"),
        (["--tokens", "many"], 2, "invalid int"),
        (["--group-tokens", "0"], 2, "places of 0; use at least 1"),
        (["--model", "no/such/model.gguf"], 1, "no such model"),
        (["--tokens", "150", "--out", "/dev/null/x"], 1, "use a writable directory"),
    ],
)
def test_tool_exit_codes(
    run: Callable[..., tuple[int, str, str]], flags: list[str], code: int, message: str
) -> None:
    got, out, said = run(*flags)
    assert (got, out) == (code, "")
    assert message in said
    assert not said.strip().endswith("Error")
