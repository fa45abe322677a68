"""Hugging Face transformers as a peer, on the CPU: static and dynamic caches, in float32 and bfloat16."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import numpy as np
from peers import PeerUnavailable, Setting, check_translatable

from swapkv_jax.models import DTYPES, Model
from swapkv_jax.planner import weight_bytes
from swapkv_jax.prefilled import Prefilled

CHUNK = 512  # prompt tokens per call: transformers' mask takes chunk × capacity bytes per row


class Transformers:
    """A `Peer`. One model per dtype serves every cache."""

    def __init__(self, model: Model, scratch: Path):
        """See `Peer`; nothing is written."""
        try:
            self._torch = torch = importlib.import_module("torch")
            self._library = importlib.import_module("transformers")
        except ImportError:
            raise PeerUnavailable('not installed; pip install "swapkv-jax[transformers]"') from None
        if int(self._library.__version__.split(".")[0]) < 5:
            raise PeerUnavailable(f"version {self._library.__version__}; pip install 'transformers>=5'")
        check_translatable(model)
        torch.set_num_threads(machine.cores())
        self.version = f"transformers {self._library.__version__}, torch {torch.__version__}"
        dtypes = dict.fromkeys([model.dtype, "float32", "bfloat16"])
        self._models = {dtype: self._build(model, dtype) for dtype in dtypes}
        g = model.geometry
        self._settings = {
            Setting(
                name=f"{kind} {dtype}",
                precision=dtype,
                kv_dtype=dtype,
                weight_bytes=weight_bytes(g, dtype),
                token_bytes=g.kv_bytes_per_token(DTYPES[dtype].itemsize),
            ): (kind, dtype)
            for dtype in dtypes
            for kind in ("static", "dynamic")
        }
        self.settings = tuple(self._settings)
        self.skipped = {
            "offloaded": "it moves layers between memory and a CUDA device; peers run on the CPU here"
        }

    def _build(self, model: Model, dtype: str) -> Any:
        g = model.geometry
        names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
        biases = {"attention_bias": g.qkv_bias, "mlp_bias": g.mlp_bias}
        config = getattr(self._library, f"{names[g.architecture]}Config")(
            vocab_size=g.vocab,
            hidden_size=g.hidden,
            intermediate_size=g.intermediate,
            num_hidden_layers=g.layers,
            num_attention_heads=g.heads,
            num_key_value_heads=g.kv_heads,
            head_dim=g.head_dim,
            max_position_embeddings=g.max_positions,
            rms_norm_eps=g.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": g.rope_theta},
            tie_word_embeddings=g.tied,
            **({"sliding_window": None} if g.architecture == "mistral" else {}),
            **(biases if g.architecture in ("llama", "qwen3") else {}),
        )
        built = getattr(self._library, f"{names[g.architecture]}ForCausalLM")(config)
        built = built.to(getattr(self._torch, dtype)).eval()
        missing, unexpected = built.load_state_dict(
            {name: tensor_of(self._torch, array) for name, array in _named(model)}, strict=False
        )
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise PeerUnavailable(f"its weights differ: {', '.join([*missing, *unexpected][:3])}")
        return built

    def open(self, setting: Setting, batch: int, capacity: int) -> TransformersRun:
        kind, dtype = self._settings[setting]
        model = self._models[dtype]
        if kind == "static":
            cache = self._library.StaticCache(config=model.config, max_cache_len=capacity)
        else:
            cache = self._library.DynamicCache(config=model.config)
        return TransformersRun(self._torch, model, cache, batch)

    def close(self) -> None:
        self._models.clear()


class TransformersRun:
    """A `PeerRun`: one cache and the tokens decoded into it."""

    def __init__(self, torch: Any, model: Any, cache: Any, batch: int):
        self._torch, self._model, self._cache, self._batch = torch, model, cache, batch
        # The argument was renamed within transformers 5.
        parameters = inspect.signature(model.forward).parameters
        self._keyword = "cache" if "cache" in parameters else "past_key_values"

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        tokens = self._torch.tensor([list(prompt) for prompt in prompts])
        chosen: list[int] = []
        for start in range(0, tokens.shape[1], CHUNK):
            chosen = self._forward(tokens[:, start : start + CHUNK])
        return chosen

    def take(self, source: Prefilled, length: int) -> None:
        dtype = next(self._model.parameters()).dtype
        with self._torch.inference_mode():
            for layer in range(self._model.config.num_hidden_layers):
                rows = [source.kv(row, layer) for row in range(self._batch)]
                k = np.stack([k[:, :, :length].swapaxes(1, 2) for k, _ in rows])
                v = np.stack([v[:, :length] for _, v in rows])
                self._cache.update(*(tensor_of(self._torch, part).to(dtype) for part in (k, v)), layer)

    def step(self, tokens: Sequence[int]) -> list[int]:
        return self._forward(self._torch.tensor(tokens)[:, None])

    @property
    def kv_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)

    def close(self) -> None:
        del self._cache

    def _forward(self, tokens: Any) -> list[int]:
        with self._torch.inference_mode():
            out = self._model(tokens, use_cache=True, logits_to_keep=1, **{self._keyword: self._cache})
            return out.logits[:, -1].argmax(-1).tolist()


def tensor_of(torch: Any, array: np.ndarray) -> Any:
    """The same values as a torch tensor, which may share the array's memory."""
    if array.dtype == DTYPES["bfloat16"]:  # not NumPy's own
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


_LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    **{f"{p}": f"self_attn.{p}_proj.weight" for p in "qkvo"},
    **{f"{p}_bias": f"self_attn.{p}_proj.bias" for p in "qkvo"},
    **{f"{p}_norm": f"self_attn.{p}_norm.weight" for p in "qk"},
    **{p: f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
    **{f"{p}_bias": f"mlp.{p}_proj.bias" for p in ("gate", "up", "down")},
}


def _named(model: Model) -> list[tuple[str, np.ndarray]]:
    """The checkpoint's tensors under their Hugging Face names."""
    weights = model.weights
    named = [("model.embed_tokens.weight", weights["embed"]), ("model.norm.weight", weights["final_norm"])]
    if "head" in weights:
        named.append(("lm_head.weight", weights["head"]))
    for i, layer in enumerate(weights["layers"]):
        named += [(f"model.layers.{i}.{_LAYER_NAMES[key]}", array) for key, array in layer.items()]
    return named
