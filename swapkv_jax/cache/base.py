"""What the engine asks of every cache policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from swapkv_jax.models.blocks import Params


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """What a cache has done and holds: bytes, calls, and seconds the engine waited for data.

    `bytes_read` and `reads` are the disk's. Of the `groups_read` under policy `group`, `groups_from_dram` came
    out of the DRAM pool, the others from disk or, before their write had ended, from memory. `read_s` adds up
    the batches of reads, each from its start until it was there (or was asked for, if that came later);
    `wait_s` is when the step waited for one: under `group`, with nothing else left to compute.
    """

    dram_used: int = 0
    disk_used: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    reads: int = 0
    writes: int = 0
    retries: int = 0
    wait_s: float = 0.0
    notes: tuple[str, ...] = ()
    groups_selected: int = 0
    groups_read: int = 0
    groups_from_dram: int = 0
    bytes_from_dram: int = 0
    reuse_rate: float | None = None
    read_s: float = 0.0
    overflow_loads: int = 0
    summary_bytes: int = 0


class Cache(Protocol):
    """One generation at a time: `begin`, prefill every row layer by layer, `start`, `step`s, `finish`."""

    def begin(self, prompts: Sequence[int], limits: Sequence[int]) -> None:
        """Makes room for rows with prompts of `prompts` tokens that may grow to `limits` tokens."""

    def slot(self, layer: int) -> tuple[jax.Array, jax.Array]:
        """K and V buffers for one layer's prefill, to be donated; waits until their last use is over."""
        ...

    def filled(self, layer: int, row: int, length: int, k: jax.Array, v: jax.Array) -> None:
        """Takes back the buffers with a row's first `length` tokens in them, and streams them out."""

    def start(self) -> None:
        """Every row is prefilled: waits for the last writes and gets ready to decode."""

    def step(
        self, layers: list[Params], x: jax.Array, lengths: jax.Array, held: np.ndarray, active: np.ndarray
    ) -> jax.Array:
        """One token of every row through all layers.

        Args:
          layers: each layer's parameters.
          x: hidden state [B, H], donated.
          lengths: tokens each row holds, int32 [B], on the device; `held` is the same on the host.
          active: bool [B]; rows that are done compute along, but nothing of theirs is kept.
        Returns: the hidden state after the last layer.
        """
        ...

    def settle(self, held: np.ndarray, active: np.ndarray) -> None:
        """Host work of the step just launched that can overlap the head, which is launched after it."""

    def newest(self, layer: int, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """K and V [B, Hkv, D] that the last step has added to rows that held `held` tokens before it. To be copied
        before the next step."""
        ...

    def finish(self) -> None:
        """The generation is over; its sequences are past."""

    def close(self) -> None:
        """Gives everything back; harmless when repeated."""

    @property
    def use(self) -> CacheUse: ...

    def addresses(self) -> dict[str, int]:
        """Where each device buffer that decode reads or writes lies; the same at every step."""
        ...
