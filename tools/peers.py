"""Other systems, decoding the same prompts with the same weights beside our engines in one process."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import machine
import numpy as np

from swapkv_jax.models import Model


class PeerUnavailable(Exception):
    """This peer cannot take part, for the reason given."""


class Transformers:
    """Hugging Face transformers with its static cache. Rows must be equally long: it has no ragged batches.

    Its model is built once, from weights that our engines have not yet taken over, and serves every cache.
    """

    name = "transformers"

    def __init__(self, model: Model):
        """Copies the weights of `model`, whose `params` must not have been used yet.

        Raises:
            PeerUnavailable: not installed, too old, or the model has RoPE scaling, which is not translated.
        """
        try:
            self._torch = torch = importlib.import_module("torch")
            self._library = importlib.import_module("transformers")
        except ImportError:
            raise PeerUnavailable('not installed; pip install "swapkv-jax[goldens]"') from None
        if int(self._library.__version__.split(".")[0]) < 5:
            raise PeerUnavailable(f"version {self._library.__version__}; pip install 'transformers>=5'")
        if model.geometry.rope_scaling is not None:
            raise PeerUnavailable(f"RoPE scaling {model.geometry.rope_scaling.kind} is not translated for it")
        torch.set_num_threads(machine.cores())
        self.version = f"transformers {self._library.__version__}, torch {torch.__version__}"
        self._dtype = getattr(torch, model.dtype)
        self._model = self._build(model)
        # The argument was renamed within transformers 5.
        parameters = inspect.signature(self._model.forward).parameters
        self._keyword = "cache" if "cache" in parameters else "past_key_values"

    def _build(self, model: Model) -> Any:
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
        built = built.to(self._dtype).eval()
        missing, unexpected = built.load_state_dict(
            {name: self._tensor(array) for name, array in _named(model)}, strict=False
        )
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise PeerUnavailable(f"its weights differ: {', '.join([*missing, *unexpected][:3])}")
        return built

    def _tensor(self, array: np.ndarray) -> Any:
        if array.dtype.itemsize == 2:  # bfloat16 is not NumPy's own
            return self._torch.from_numpy(array.view(np.int16)).view(self._dtype)
        return self._torch.from_numpy(array)

    def open(self, batch: int, capacity: int) -> TransformersDecode:
        """A decode of `batch` rows over a static cache of `capacity` tokens."""
        return TransformersDecode(
            self._torch,
            self._model,
            self._keyword,
            self._library.StaticCache(config=self._model.config, max_cache_len=capacity),
            batch,
        )


class TransformersDecode:
    """One static cache and the tokens decoded into it."""

    CHUNK = 512  # prompt tokens per call: transformers' mask takes chunk × capacity bytes per row

    def __init__(self, torch: Any, model: Any, keyword: str, cache: Any, batch: int):
        self._torch, self._model, self._keyword, self._cache = torch, model, keyword, cache
        self._tokens = torch.zeros((batch, 1), dtype=torch.long)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Computes the prompts, of equal length, and the first token of each row."""
        tokens = self._torch.tensor([list(prompt) for prompt in prompts])
        for start in range(0, tokens.shape[1], self.CHUNK):
            self._forward(tokens[:, start : start + self.CHUNK])
        return self._tokens[:, 0].tolist()

    def prefill_randomly(self, length: int) -> None:
        """Random keys and values for the first `length` tokens, which are not computed."""
        self._forward(self._tokens)  # the cache allocates itself on its first use
        with self._torch.inference_mode():  # the cache's tensors were made under it
            for layer in self._cache.layers:
                for part in (layer.keys, layer.values):
                    part[:, :, :length].normal_()
                layer.cumulative_length.fill_(length)

    def step(self) -> list[int]:
        """The next token of each row."""
        self._forward(self._tokens)
        return self._tokens[:, 0].tolist()

    def take(self, tokens: Sequence[int]) -> None:
        """These tokens, one per row, go on in place of those that were chosen."""
        self._tokens = self._torch.tensor(tokens)[:, None]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the static cache."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)

    def _forward(self, tokens: Any) -> None:
        with self._torch.inference_mode():
            out = self._model(tokens, use_cache=True, logits_to_keep=1, **{self._keyword: self._cache})
            self._tokens = out.logits[:, -1].argmax(-1, keepdim=True)


PEERS = {Transformers.name: Transformers}

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
