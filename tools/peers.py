"""What a benchmark asks of another system that decodes beside our engines, and which ones there are."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from swapkv_jax import ModelError
from swapkv_jax.models import Model
from swapkv_jax.prefilled import Prefilled


class PeerUnavailable(ModelError):
    """A peer, or one setting of it, cannot take part, for the reason given."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run a peer. `precision` is that of its weights: a dtype's name, or a quantisation's; `kv_dtype` that
    of keys and values. `weight_bytes` and `token_bytes` (of KV per token and row) are what a step must read."""

    name: str
    precision: str
    kv_dtype: str
    weight_bytes: int
    token_bytes: int


class PeerRun(Protocol):
    """Rows of equal length being decoded under one setting: a prefill or `take`, then steps."""

    @property
    def kv_bytes(self) -> int:
        """Bytes that keys and values take."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Computes the prompts, of equal length, and the first token of each row."""
        ...

    def take(self, source: Prefilled, length: int) -> None:
        """The first `length` tokens of every row from `source`, instead of computing them."""
        ...

    def step(self, tokens: Sequence[int]) -> list[int]:
        """Adds a token to each row; returns the next ones, chosen greedily."""
        ...

    def close(self) -> None: ...


class Peer(Protocol):
    """A system that is installed, with the weights of one model. Serves several runs at once.

    Made as `Peer(model, scratch)`: `model.params` must not have been used yet, since that takes the weights over, and
    `scratch` is a directory for its own files, which is removed after `close`. Raises PeerUnavailable.
    """

    version: str
    settings: Sequence[Setting]
    skipped: Mapping[str, str]
    """Settings that cannot run here, and why."""

    def open(self, setting: Setting, batch: int, capacity: int) -> PeerRun:
        """`batch` rows of up to `capacity` tokens. Raises PeerUnavailable."""
        ...

    def close(self) -> None: ...


_HOMES = {
    "transformers": ("peer_transformers", "Transformers"),
    "llama-cpp": ("peer_llama", "LlamaCpp"),
}
PEERS = tuple(_HOMES)


def make_peer(name: str, model: Model, scratch: Path) -> Peer:
    """The peer called `name`, one of `PEERS`. Raises PeerUnavailable."""
    module, kind = _HOMES[name]
    return getattr(importlib.import_module(module), kind)(model, scratch)


def check_translatable(model: Model) -> None:
    """Raises PeerUnavailable for what is not told to any peer."""
    if model.geometry.rope_scaling is not None:
        raise PeerUnavailable(f"RoPE scaling {model.geometry.rope_scaling.kind} is not translated for it")
