"""Tiny random checkpoints in Hugging Face form: one directory per architecture feature, from a seed.

`tiny_checkpoint(name, directory)` writes `config.json`, `generation_config.json`, safetensors and a working
tokenizer. The weights come from NumPy's PCG64 stream alone, so the golden files made from the same
directories by transformers stay valid; `weights_digest` tells when they would not.

The scales are chosen so that a mistake shows: attention scores have a standard deviation above 1 (a wrong
rotation or mask moves the result), logits spread over several units, norms and biases are far from 1 and 0.
Only numpy and tokenizers are needed: the files are written by hand, independently of the loaders under test.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB = 304
BOS, EOS = 0, 1
MERGED = ("Ġthe", "Ġand", "Ġof", "Ġto", "Ġin", "ing", "er", "ed", "on", "at", "en", "is", "or", "es", "al")
SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One checkpoint of the table: `config` overrides the base config of its `model_type`.

    `prompts` are the prompt lengths of its golden rows. `shards` > 1 writes that many safetensors files and
    their index. `storage` is the dtype in the file, "F32" or "BF16". `like` names the checkpoint whose
    weights (before rounding to `storage`) and prompts this one shares.
    """

    model_type: str = "llama"
    config: Mapping[str, Any] = field(default_factory=dict)
    prompts: tuple[int, ...] = (37,)
    shards: int = 1
    storage: str = "F32"
    like: str | None = None


# Context limits are small so that prompts of 37 tokens and 40 more cross every scaling's own boundary.
# Each RoPE kind is written once as `rope_theta` + `rope_scaling` (most published checkpoints) or once as
# `rope_parameters` (transformers 5); "type" and "rope_type" both occur in the wild.
TINY: dict[str, Tiny] = {
    "llama": Tiny(prompts=(37, 1, 16, 90)),
    "llama-untied-bias": Tiny(
        config={
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "num_hidden_layers": 3,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        }
    ),
    "llama-mha": Tiny(config={"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama-mqa": Tiny(config={"num_key_value_heads": 1, "num_hidden_layers": 5}),
    "llama-linear": Tiny(config={"rope_scaling": {"type": "linear", "factor": 2.5}}),
    # 37 + 40 tokens grow past the 64 original positions, 90 are past them from the start, 8 + 40 stay inside.
    "llama-dynamic": Tiny(
        config={
            "tie_word_embeddings": False,
            "max_position_embeddings": 64,
            "rope_scaling": {"type": "dynamic", "factor": 4.0},
        },
        prompts=(37, 90, 8),
    ),
    "llama-llama3": Tiny(
        config={
            "head_dim": 16,
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        }
    ),
    "llama-yarn": Tiny(
        config={
            "tie_word_embeddings": False,
            "rope_theta": 500.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        }
    ),
    "mistral": Tiny(
        model_type="mistral",
        config={"sliding_window": None, "head_dim": 24, "tie_word_embeddings": False, "num_hidden_layers": 3},
    ),
    # Published Qwen2 configs carry a window that `use_sliding_window` switches off.
    "qwen2": Tiny(
        model_type="qwen2",
        config={"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2},
        prompts=(37, 5),
    ),
    "qwen2-yarn": Tiny(
        model_type="qwen2",
        config={
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "mscale": 1.3,
                "mscale_all_dim": 0.4,
                "truncate": False,
            },
        },
    ),
    "qwen3": Tiny(
        model_type="qwen3",
        config={"head_dim": 32, "use_sliding_window": False, "tie_word_embeddings": False},
        prompts=(37, 50),
    ),
    "qwen3-bias": Tiny(
        model_type="qwen3",
        config={
            "head_dim": 24,
            "attention_bias": True,
            "use_sliding_window": False,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "llama-bf16": Tiny(storage="BF16", like="llama"),
    "llama-sharded": Tiny(shards=3, like="llama"),  # the same weights as llama, so no golden of its own
}


def tiny_config(name: str) -> dict[str, Any]:
    """The `config.json` of a checkpoint of the table; keys set to None in the table are left out, except
    `sliding_window`, whose null is what says that a Mistral has no window."""
    spec = TINY[name]
    architecture = {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }[spec.model_type]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": spec.model_type,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16" if spec.storage == "BF16" else "float32",
    }
    config.update(spec.config)
    return {k: v for k, v in config.items() if v is not None or k == "sliding_window"}


def tiny_tensors(name: str) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by Hugging Face name, float32, projections as [out, in]."""
    spec, config = TINY[name], tiny_config(name)
    rng = _rng(f"{spec.like or name} weights")
    hidden, inner, layers = (config[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    attention_bias = config.get("attention_bias", False)
    qkv_bias = attention_bias or spec.model_type == "qwen2"
    tensors: dict[str, np.ndarray] = {}

    def linear(prefix: str, out: int, fan_in: int, gain: float, bias: bool = False) -> None:
        std = gain / np.sqrt(fan_in)
        tensors[f"{prefix}.weight"] = (rng.standard_normal((out, fan_in)) * std).astype(np.float32)
        if bias:
            tensors[f"{prefix}.bias"] = (rng.standard_normal(out) * 0.3).astype(np.float32)

    def norm(name: str, size: int, centre: float = 1.0) -> None:
        tensors[f"{name}.weight"] = (centre + 0.25 * rng.standard_normal(size)).astype(np.float32)

    linear("model.embed_tokens", VOCAB, hidden, gain=2.5)
    for i in range(layers):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", hidden)
        linear(f"{layer}.self_attn.q_proj", heads * dim, hidden, 1.4, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_heads * dim, hidden, 1.4, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_heads * dim, hidden, 1.2, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, heads * dim, 1.4, attention_bias)
        if spec.model_type == "qwen3":
            norm(f"{layer}.self_attn.q_norm", dim, centre=1.3)
            norm(f"{layer}.self_attn.k_norm", dim, centre=1.3)
        norm(f"{layer}.post_attention_layernorm", hidden)
        mlp_bias = config.get("mlp_bias", False)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, 1.2, mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, 1.2, mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, 1.4, mlp_bias)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", VOCAB, hidden, gain=2.5)
    return tensors


def weights_digest(name: str) -> str:
    """SHA-256 over every tensor's name and float32 bytes: the goldens record it, the tests compare it."""
    digest = hashlib.sha256()
    for key, value in tiny_tensors(name).items():
        digest.update(key.encode() + value.tobytes())
    return digest.hexdigest()


def tiny_prompts(name: str) -> list[list[int]]:
    """Random prompt token ids, one list per golden row, without special tokens."""
    rng = _rng(f"{TINY[name].like or name} prompts")
    return [rng.integers(len(SPECIALS), VOCAB, size=n).tolist() for n in TINY[name].prompts]


def golden_name(name: str) -> str:
    """Whose golden file holds for checkpoint `name`: its own unless the stored weights are another's."""
    spec = TINY[name]
    return spec.like if spec.like is not None and spec.storage == "F32" else name


def tiny_checkpoint(name: str, directory: str | Path) -> Path:
    """Write checkpoint `name` of `TINY` into `directory` (made if missing) and return it as a Path."""
    spec, config, path = TINY[name], tiny_config(name), Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    tensors = tiny_tensors(name)
    if spec.shards == 1:
        write_safetensors(path / "model.safetensors", tensors, spec.storage)
    else:
        names, where = list(tensors), {}
        for i in range(spec.shards):
            file = f"model-{i + 1:05d}-of-{spec.shards:05d}.safetensors"
            part = {k: tensors[k] for k in names[i :: spec.shards]}
            write_safetensors(path / file, part, spec.storage)
            where.update(dict.fromkeys(part, file))
        total = sum(t.nbytes for t in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        _write_json(path / "model.safetensors.index.json", index)
    tokenizer = tiny_tokenizer(add_bos=spec.model_type in ("llama", "mistral"))
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIALS[BOS],
            "eos_token": SPECIALS[EOS],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return path


def tiny_tokenizer(*, add_bos: bool) -> Tokenizer:
    """A byte-level BPE of exactly `VOCAB` tokens: specials, the 256 bytes, then merges of common English."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIALS, *alphabet]
    merges: list[tuple[str, str]] = []
    for word in MERGED:
        for end in range(2, len(word) + 1):
            pair = (word[: end - 1], word[end - 1])
            if "".join(pair) not in tokens:
                tokens.append("".join(pair))
                merges.append(pair)
    for letter in "bcdefghijklmnopqrstuvwxyz":
        if len(tokens) < VOCAB and "Ġ" + letter not in tokens:
            tokens.append("Ġ" + letter)
            merges.append(("Ġ", letter))
    assert len(tokens) == VOCAB, len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    if add_bos:
        bos = (SPECIALS[BOS], BOS)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]} $A", pair=f"{bos[0]} $A $B", special_tokens=[bos]
        )
    return tokenizer


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], storage: str = "F32") -> None:
    """Write float32 `tensors` as one safetensors file in `storage` ("F32", or "BF16" rounded to even)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, tensor in tensors.items():
        blob = (_bfloat16_bits(tensor) if storage == "BF16" else tensor.astype("<f4")).tobytes()
        span = [offset, offset + len(blob)]
        header[name] = {"dtype": storage, "shape": list(tensor.shape), "data_offsets": span}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def _rng(purpose: str) -> np.random.Generator:
    seed = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.PCG64(seed))


def _bfloat16_bits(tensor: np.ndarray) -> np.ndarray:
    bits = tensor.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
