"""The first 128 KiB of a sequence's file: two alternating copies of a versioned, checksummed header.

Each copy is a fixed prefix (magic, format version, JSON length, generation, checksum) and a JSON object.
Generation g goes to copy g mod 2, so a header write that is torn leaves the one before it valid. Readers
take the valid copy of the highest generation. `meta` is open to new keys; any other new field takes a new
format version.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import xxhash

from swapkv_jax.tiers.direct_io import PAGE
from swapkv_jax.tiers.record import record_stride

FORMAT_VERSION = 1
COPY_BYTES = 64 << 10
HEADER_BYTES = 2 * COPY_BYTES

_MAGIC = b"SWAPKV\r\n"  # the line end shows a file that went through a text-mode transfer
_PREFIX = struct.Struct(
    "<8sIIQQ"
)  # magic, version, JSON bytes, generation, xxh3_64 of JSON seeded by generation


class Extent(NamedTuple):
    """`groups` groups of every layer from `first_group` on, layer after layer, at `file_offset`."""

    first_group: int
    groups: int
    file_offset: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a sequence's file says about itself. `meta` is the caller's (geometry, token counts, …)."""

    sequence: str
    fingerprint: str
    ephemeral: bool
    layers: int
    group_tokens: int
    payload_bytes: int
    stride: int
    alignment: int
    nonce: int
    max_groups: int | None = None
    extents: tuple[Extent, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    generation: int = 0

    @property
    def groups(self) -> int:
        """Groups the extents have room for."""
        return self.extents[-1].first_group + self.extents[-1].groups if self.extents else 0

    @property
    def end(self) -> int:
        """File offset just after the last extent."""
        if not self.extents:
            return HEADER_BYTES
        return self.extents[-1].file_offset + self.extent_bytes(self.extents[-1].groups)

    def extent_bytes(self, groups: int) -> int:
        """Bytes of an extent of `groups` groups, whole pages so that the next one starts aligned."""
        return extent_bytes(self.layers, groups, self.stride)


class HeaderError(ValueError):
    """Neither copy can be used; the message says why, and reads on after the file's path."""


def extent_bytes(layers: int, groups: int, stride: int) -> int:
    """Bytes that `groups` groups of `layers` layers take on disk, rounded up to a page."""
    return -(-layers * groups * stride // PAGE) * PAGE


def encode(header: Header) -> tuple[int, bytes]:
    """(file offset, bytes) of the copy that `header.generation` goes to.

    Raises:
        HeaderError: more than a copy has room for.
    """
    values = asdict(header)
    generation = values.pop("generation")
    text = json.dumps(values, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(text), generation, _checksum(text, generation))
    if len(prefix) + len(text) > COPY_BYTES:
        raise HeaderError(
            f"the header needs {len(prefix) + len(text)} bytes and has {COPY_BYTES}; store less in `meta`"
        )
    return generation % 2 * COPY_BYTES, prefix + text


def decode(data: bytes) -> Header | None:
    """The newest valid header in the first `HEADER_BYTES` of a file; None where nothing was ever written.

    Raises:
        HeaderError: not a sequence file, another format version, or both copies damaged.
    """
    if not any(data):
        return None
    copies = [data[:COPY_BYTES], data[COPY_BYTES:HEADER_BYTES]]
    headers = [header for header in map(_decode_copy, copies) if header is not None]
    if headers:
        return max(headers, key=lambda header: header.generation)
    prefixes = [_PREFIX.unpack_from(copy) for copy in copies if len(copy) >= _PREFIX.size]
    versions = {version for magic, version, *_ in prefixes if magic == _MAGIC}
    if not versions:
        raise HeaderError("is not a swapkv_jax sequence file; point --store-dir at a directory of its own")
    if FORMAT_VERSION not in versions:
        raise HeaderError(
            f"has format version {max(versions)}, this version reads {FORMAT_VERSION}; "
            f"use the version that wrote it, or delete it"
        )
    raise HeaderError("has a damaged header; delete it, its sequence must be prefilled again")


def damaged_copies(data: bytes) -> list[int]:
    """Which of the two copies in the first `HEADER_BYTES` of a file were written and cannot be read."""
    copies = (data[:COPY_BYTES], data[COPY_BYTES:HEADER_BYTES])
    return [i for i, copy in enumerate(copies) if any(copy) and _decode_copy(copy) is None]


def readable(data: bytes) -> bool:
    """Whether `decode` finds a header."""
    try:
        return decode(data) is not None
    except HeaderError:
        return False


def _decode_copy(copy: bytes) -> Header | None:
    if len(copy) < _PREFIX.size:
        return None
    magic, version, length, generation, checksum = _PREFIX.unpack_from(copy)
    text = copy[_PREFIX.size : _PREFIX.size + length]
    if magic != _MAGIC or version != FORMAT_VERSION or checksum != _checksum(text, generation):
        return None
    try:
        values = json.loads(text)
        values["extents"] = tuple(Extent(*extent) for extent in values["extents"])
        header = Header(generation=generation, **values)
        return header if _consistent(header) else None
    except (ValueError, TypeError, KeyError):
        return None  # sealed, but not by this package


def _consistent(header: Header) -> bool:
    """Whether offsets computed from the header stay inside its own extents, whoever wrote it."""
    sizes = (header.layers, header.group_tokens, header.payload_bytes, header.alignment)
    if min(sizes) <= 0 or header.stride != record_stride(header.payload_bytes, header.alignment):
        return False
    group, offset = 0, HEADER_BYTES
    for extent in header.extents:
        if extent.first_group != group or extent.groups <= 0 or extent.file_offset != offset:
            return False
        group += extent.groups
        offset += header.extent_bytes(extent.groups)
    return True


def _checksum(text: bytes, generation: int) -> int:
    return xxhash.xxh3_64_intdigest(text, seed=generation)
