"""Reading a GGUF file: metadata, tensor directory and dequantised tensors.

The `gguf` package's own reader builds an array object per string and does not check lengths against the
file, so a damaged count can keep it busy for hours; its constants and dequantisation are used here.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from swapkv_jax.errors import ModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_REMEDY = "download it again"
_INTEGERS = {"I8", "I16", "I32", "I64"}
_SCALARS: dict[GGUFValueType, np.dtype] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.BOOL: np.dtype("?"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
}


@dataclass(frozen=True)
class GGUFTensor:
    """A directory entry: shape in NumPy order (outermost first), type, and bytes in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """An opened GGUF: `metadata` (scalars, strings, lists) and `tensors` by name; a `TensorSource`.

    Raises ModelError, naming the path and what is wrong, for anything that is not a whole, sound file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot read it as GGUF ({error}); {_REMEDY}") from error
        cursor = _Cursor(self._bytes.data)
        try:
            self.metadata, self.tensors = self._parse(cursor)
        except (_DamagedError, struct.error, ValueError, OverflowError, MemoryError) as error:
            raise ModelError(
                f"{path}: damaged or truncated GGUF at byte {cursor.at} ({error}); {_REMEDY}"
            ) from error

    def _parse(self, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if cursor.take(4) != MAGIC:
            raise _DamagedError("no GGUF magic")
        version = cursor.integer("<I")
        if version not in _VERSIONS:
            raise _DamagedError(
                f"version {version}; supported: {', '.join(map(str, _VERSIONS))}, little-endian"
            )
        tensor_count, field_count = cursor.integer("<Q"), cursor.integer("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(field_count):
            key = cursor.string()
            metadata[key] = cursor.value(GGUFValueType(cursor.integer("<I")))
        entries: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        for _ in range(tensor_count):
            name = cursor.string()
            if name in entries:
                raise _DamagedError(f"tensor {name} is listed twice")
            shape = tuple(cursor.integer("<Q") for _ in range(cursor.integer("<I")))[::-1]
            entries[name] = (shape, GGMLQuantizationType(cursor.integer("<I")), cursor.integer("<Q"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise _DamagedError(f"alignment {alignment}")
        base = -(-cursor.at // alignment) * alignment
        return metadata, {name: self._entry(name, base, *entry) for name, entry in entries.items()}

    def _entry(
        self, name: str, base: int, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int
    ) -> GGUFTensor:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise _DamagedError(f"tensor {name} of type {kind.name} has shape {list(shape)}")
        tensor = GGUFTensor(shape, kind, base + offset, math.prod(shape) // block * block_bytes)
        if tensor.offset + tensor.nbytes > self._bytes.size:
            raise _DamagedError(
                f"tensor {name} ends at byte {tensor.offset + tensor.nbytes}, the file at {self._bytes.size}"
            )
        return tensor

    @property
    def names(self) -> set[str]:
        return set(self.tensors)

    def where(self, name: str) -> str:
        return str(self.path)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, dequantised. Raises ModelError for types that hold no float weights."""
        tensor = self.tensors[name]
        raw = self._bytes[tensor.offset : tensor.offset + tensor.nbytes]
        if tensor.kind == GGMLQuantizationType.F64:
            return raw.view("<f8").reshape(tensor.shape)
        block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        try:
            if tensor.kind.name in _INTEGERS:
                raise NotImplementedError("it holds integers")
            values = dequantize(rows, tensor.kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} has type {tensor.kind.name} ({error}); "
                "supported: float types and the quantised types the gguf package dequantises"
            ) from error
        # F32 comes back as a view of the file; weights must not follow later writes to it.
        return values.reshape(tensor.shape).astype(np.float32, copy=tensor.kind == GGMLQuantizationType.F32)


class _DamagedError(Exception):
    """The bytes are not a GGUF; the message says how."""


class _Cursor:
    """A position in the file's bytes; every read is checked against the end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise _DamagedError(f"{count} bytes expected, {len(self._data) - self.at} left")
        self.at += count
        return bytes(self._data[self.at - count : self.at])

    def integer(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.integer("<Q")).decode("utf-8")

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind in _SCALARS:
            return np.frombuffer(self.take(_SCALARS[kind].itemsize), _SCALARS[kind])[0].item()
        if kind != GGUFValueType.ARRAY:
            raise _DamagedError(f"value type {kind}")
        item, count = GGUFValueType(self.integer("<I")), self.integer("<Q")
        if item in _SCALARS:
            return np.frombuffer(self.take(count * _SCALARS[item].itemsize), _SCALARS[item]).tolist()
        if item != GGUFValueType.STRING:
            raise _DamagedError("nested array")
        return [self.string() for _ in range(count)]
