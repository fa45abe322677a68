"""Where KV lives when it is not on the device: DRAM pool and disk store."""

from swapkv_jax.tiers.direct_io import IoCounts, Syscalls, aligned_buffer, sequential_read_rate
from swapkv_jax.tiers.disk_store import DiskStore, planned_file_bytes
from swapkv_jax.tiers.dram_pool import BLOCK_BYTES, DramPool, TensorRef
from swapkv_jax.tiers.eviction import SequenceOrder
from swapkv_jax.tiers.record import record_stride
from swapkv_jax.tiers.scattered import ScatteredReader, write_scattered
from swapkv_jax.tiers.sequence_file import Run, SequenceFile

__all__ = [
    "BLOCK_BYTES",
    "DiskStore",
    "DramPool",
    "IoCounts",
    "Run",
    "ScatteredReader",
    "SequenceFile",
    "SequenceOrder",
    "Syscalls",
    "TensorRef",
    "aligned_buffer",
    "planned_file_bytes",
    "record_stride",
    "sequential_read_rate",
    "write_scattered",
]
