"""Prefill from a source other than the prompt: what it leaves behind is written into the cache as it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import jax
import numpy as np

from swapkv_jax.errors import UsageError
from swapkv_jax.graph import scalar
from swapkv_jax.models import DTYPES, Model

Prompts = Sequence[Sequence[int]]


class Prefilled(Protocol):
    """What the prefill of some prompts leaves behind, row by row and layer by layer; n tokens per row."""

    def check(self, model: Model, prompts: Prompts) -> None:
        """Raises UsageError if this is not a prefill of these prompts for this model."""

    def kv(self, row: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """K [Hkv, D, n] and V [Hkv, n, D] in the model's dtype."""
        ...

    def hidden(self, row: int) -> np.ndarray:
        """The last token's hidden state [H] after the last layer, in the model's dtype."""
        ...


class RandomPrefill:
    """Standard normal keys and values, and hidden states of zero: for timing decode without a long prefill.

    The numbers depend on row, layer, Hkv, D and the prompt's length alone, so that every cache policy gets the
    same ones. The text that comes out means nothing.
    """

    def __init__(self, model: Model, prompts: Prompts):
        self._geometry, self._dtype = model.geometry, DTYPES[model.dtype]
        self._lengths = [len(prompt) for prompt in prompts]

    def check(self, model: Model, prompts: Prompts) -> None:
        same_model = (model.geometry, DTYPES[model.dtype]) == (self._geometry, self._dtype)
        if not same_model or [len(prompt) for prompt in prompts] != self._lengths:
            raise UsageError("the random prefill was made for other prompts or another model; make a new one")

    def kv(self, row: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        heads, dim, length = self._geometry.kv_heads, self._geometry.head_dim, self._lengths[row]
        draw = np.random.default_rng(row * self._geometry.layers + layer).standard_normal
        k, v = draw((heads, dim, length), np.float32), draw((heads, length, dim), np.float32)
        return k.astype(self._dtype), v.astype(self._dtype)

    def hidden(self, row: int) -> np.ndarray:
        return np.zeros(self._geometry.hidden, self._dtype)


def check_prompts(prompts: Prompts, vocab: int) -> None:
    """Raises UsageError for a prompt that is empty or holds ids that the embedding does not have."""
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"prompt {row + 1} is empty; give at least one token")
        if not all(0 <= token < vocab for token in prompt):
            raise UsageError(f"prompt {row + 1} holds token ids outside 0 to {vocab - 1}")


def write_row(buffer: jax.Array, part: np.ndarray, row: int) -> jax.Array:
    """Writes K [Hkv, D, n] or V [Hkv, n, D] as a row's first n tokens into a donated buffer [rows, …].

    The row's other tokens become zeros: with whole rows, one graph serves prompts of every length.
    """
    whole = np.zeros(
        (1, *buffer.shape[1:]), buffer.dtype
    )  # fresh: on a CPU the device reads this very memory
    whole[(0, *map(slice, part.shape))] = part
    return _write_row(buffer, whole, scalar(row))


@partial(jax.jit, donate_argnums=0)
def _write_row(buffer: jax.Array, whole: jax.Array, row: jax.Array) -> jax.Array:
    zero = row * 0
    return jax.lax.dynamic_update_slice(buffer, whole, (row, zero, zero, zero))
