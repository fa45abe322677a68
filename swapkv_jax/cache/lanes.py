"""A way for records into slots: the staging memory that they arrive in, and what fills it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from swapkv_jax.cache.record_reader import RecordReader
from swapkv_jax.staging import StagingBuffer


@dataclass
class Lane:
    """A staging slot and what fills it, since `started` (seconds of `time.perf_counter`). `fence` is ready when the
    last load from the slot has read it."""

    staging: StagingBuffer
    reader: RecordReader
    fence: jax.Array | None = None
    started: float = 0.0

    def wait_reusable(self) -> None:
        """Blocks until nothing reads the staging slot any more."""
        if self.fence is not None:
            self.fence.block_until_ready()

    def read_now(self, layer: int, rows: np.ndarray, groups: np.ndarray) -> None:
        """Reads groups [n] of rows [n] into the staging slot, and waits for them.

        Raises:
          TierError: a record cannot be read or is damaged.
        """
        self.wait_reusable()
        try:
            self.reader.start(layer, rows, groups, self.staging.records[: len(rows)])
            self.reader.finish()
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """Forgets what is on its way: damaged values must not stay where weight 0 would meet them."""
        self.reader.cancel()
        self.staging.buffer[...] = 0
