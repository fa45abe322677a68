"""Regenerate tests/goldens/*.npz with Hugging Face transformers as the reference.

    pip install 'swapkv-jax[goldens]'
    python tools/make_goldens.py                                  # the tiny checkpoints of tests/tiny.py
    python tools/make_goldens.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --long-text some_novel.txt

Every golden is greedy decoding with a KV cache, token by token, batch 1, float32, eager attention, on the
CPU. End-of-sequence tokens do not stop it.

`<tiny name>.npz`: for each row i, `prompt_i` [P] int32, `tokens_i` [T] int32 and `logits_i` [T, V] float32,
where `logits_i[t]` are the logits that `tokens_i[t]` is the argmax of; `weights_sha256` of the checkpoint.

`smollm2-<prompt>.npz`: `prompt` [P], `tokens` [T] int32; the 16 largest logits of each step as `top_indices`
[T, 16] int32 and `top_logits` [T, 16] float32, largest first; all logits of the first and the last step as
`first_logits`, `last_logits` [V] float32; `text`, what the prompt was tokenised from, empty for the long one;
`gguf_sha256` of the weights file. Without --long-text the long prompt is the one already stored.

`made_with` names the versions in both.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import inspect
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
)

ROOT = Path(__file__).resolve().parents[1]
TINY_STEPS, REAL_STEPS, TOP = 40, 64, 16
SHORT_TEXT = "The history of the steam engine begins in the first century, when"
QUESTION = "Why does the sky turn red at sunset? Explain in a few sentences."
LONG_TOKENS = 1500
MADE_WITH = f"transformers {transformers.__version__}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Regenerate the golden files with Hugging Face transformers."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "goldens")
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct; without it, tiny models only")
    parser.add_argument("--long-text", type=Path, help="text whose beginning becomes the long prompt")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tiny = _load_tiny()
    for name in tiny.TINY:
        if tiny.golden_name(name) == name:
            write_tiny(tiny, name, args.out / f"{name}.npz")
    if args.gguf is not None:
        write_real(args.gguf, args.long_text, args.out)


def write_tiny(tiny: ModuleType, name: str, file: Path) -> None:
    """Write the golden of one tiny checkpoint; every row gets a freshly loaded model, because transformers'
    dynamic RoPE remembers the longest sequence it has met."""
    arrays: dict[str, Any] = {"weights_sha256": tiny.weights_digest(name), "made_with": MADE_WITH}
    with tempfile.TemporaryDirectory() as directory:
        tiny.tiny_checkpoint(name, directory)
        for i, prompt in enumerate(tiny.tiny_prompts(name)):
            model = _load_model(directory)
            tokens, logits = greedy(model, prompt, TINY_STEPS)
            arrays |= {
                f"prompt_{i}": np.array(prompt, np.int32),
                f"tokens_{i}": tokens,
                f"logits_{i}": logits,
            }
            _describe(f"{name} row {i}", prompt, tokens, logits)
    np.savez_compressed(file, **arrays)


def write_real(weights: Path, long_text: Path | None, out: Path) -> None:
    """Write the three SmolLM2 goldens, once transformers is seen to have dequantised the GGUF faithfully."""
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    model = _load_model(str(weights.parent), gguf_file=weights.name)
    check_gguf(model, weights)
    tokenizer = AutoTokenizer.from_pretrained(str(weights.parent), gguf_file=weights.name)
    chat = [{"role": "user", "content": QUESTION}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompts = {
        "short": (SHORT_TEXT, tokenizer(SHORT_TEXT)["input_ids"]),
        "chat": (QUESTION, tokenizer(rendered, add_special_tokens=False)["input_ids"]),
        "long": ("", _long_prompt(tokenizer, long_text, out / "smollm2-long.npz")),
    }
    for name, (text, prompt) in prompts.items():
        tokens, logits = greedy(model, prompt, REAL_STEPS)
        order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
        np.savez_compressed(
            out / f"smollm2-{name}.npz",
            prompt=np.array(prompt, np.int32),
            tokens=tokens,
            top_indices=order.astype(np.int32),
            top_logits=np.take_along_axis(logits, order, axis=1),
            first_logits=logits[0],
            last_logits=logits[-1],
            text=text,
            gguf_sha256=digest,
            made_with=MADE_WITH,
        )
        _describe(f"smollm2-{name}", prompt, tokens, logits)
        print("   ", repr(tokenizer.decode(tokens)))


@torch.no_grad()
def greedy(model: Any, prompt: list[int], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Decode `steps` tokens after `prompt`; returns tokens [T] int32 and the logits [T, V] they came from."""
    cache = DynamicCache(config=model.config)
    # The argument was renamed in transformers 5.
    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    tokens, logits = [], []
    feed = torch.tensor([prompt])
    for _ in range(steps):
        step = model(feed, use_cache=True, logits_to_keep=1, **{keyword: cache}).logits[0, -1].numpy()
        logits.append(step)
        tokens.append(int(step.argmax()))
        feed = torch.tensor([tokens[-1:]])
    return np.array(tokens, np.int32), np.stack(logits)


def check_gguf(model: Any, weights: Path) -> None:
    """Fail unless the loaded weights equal the file's, bit for bit, and the config its metadata.

    The names and the un-permutation are written out here, independently of transformers: GGUF's Llama keeps
    each query and key head's rows interleaved (pair 0 of both halves, pair 1, …), transformers halved.
    """
    reader = gguf.GGUFReader(weights)
    config, state = model.config, model.state_dict()
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for i in range(config.num_hidden_layers):
        names |= {f"blk.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in parts.items()}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if stem.endswith(("attn_q", "attn_k")):
            heads = config.num_attention_heads if stem.endswith("q") else config.num_key_value_heads
            value = value.reshape(heads, -1, 2, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        loaded = state[f"{names.pop(stem)}.weight"].numpy()
        if not np.array_equal(loaded, value):
            sys.exit(f"{tensor.name}: transformers' weights differ by {np.abs(loaded - value).max()}")
    if left := set(names) - {"output"}:
        sys.exit(f"{weights}: no tensors for {sorted(left)}")
    fields = {
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }
    for key, loaded in fields.items():
        field = reader.get_field(f"llama.{key}")
        if field is None or not np.isclose(field.contents(), loaded, rtol=1e-6):
            sys.exit(f"llama.{key}: transformers has {loaded}, the file {field and field.contents()}")
    print(f"{weights.name}: {len(reader.tensors)} tensors equal, rope_parameters {config.rope_parameters}")


def _long_prompt(tokenizer: Any, text: Path | None, stored: Path) -> list[int]:
    if text is not None:
        # English runs at four to five characters a token, so eight are sure to fill the prompt.
        return tokenizer(text.read_text(encoding="utf-8")[: 8 * LONG_TOKENS])["input_ids"][:LONG_TOKENS]
    if stored.exists():
        return np.load(stored)["prompt"].tolist()
    sys.exit(f"{stored} does not exist: pass --long-text FILE to make its prompt")


def _load_model(source: str, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager", **kwargs
    ).eval()


def _describe(title: str, prompt: list[int], tokens: np.ndarray, logits: np.ndarray) -> None:
    best = np.sort(logits, axis=1)[:, -2:]
    margin, spread = (best[:, 1] - best[:, 0]).min(), logits.std(axis=1).mean()
    print(
        f"{title}: {len(prompt)} + {len(tokens)} tokens, {len(set(tokens.tolist()))} distinct, "
        f"least margin {margin:.4f}, logit std {spread:.2f}"
    )


def _load_tiny() -> ModuleType:
    """tests/tiny.py, which is not part of the installed package."""
    spec = importlib.util.spec_from_file_location("tiny", ROOT / "tests" / "tiny.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
