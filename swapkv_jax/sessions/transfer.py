"""Sessions as single files: to keep elsewhere, or for another store.

A safetensors file, so that other programs can read it: `tokens` I32 [n], and for every layer `k.N` [Hkv, D, stored]
and `v.N` [Hkv, stored, D]. Its metadata hold the session's name, identity and state, and a checksum of all tensors.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import xxhash

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.sessions.identity import Identity
from swapkv_jax.sessions.layout import Layout
from swapkv_jax.sessions.session import Session
from swapkv_jax.sessions.store import SessionStore, check_name

Progress = Callable[[int, int], None]

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FORMAT = "swapkv_jax session 1"
_NO_CHECKSUM = "0" * 32


def export_session(
    session: Session, identity: Identity, path: Path, progress: Progress | None = None
) -> None:
    """Writes what an open session was last committed with to a new file that only its owner can read. It is not
    encrypted, whether or not the session is.

    Raises:
      UsageError: the file exists, or cannot be made.
      TierError: the session cannot be read, or the disk is full; no file is left.
    """
    layout = Layout.of(identity)
    tokens = np.array(session.tokens, "<i4")
    shapes = _shapes(layout, len(tokens), session.stored)
    metadata = {
        "format": _FORMAT,
        "name": session.name,
        "identity": identity.to_json(),
        "state": msgspec.json.encode(session.state).decode(),
        "checksum": _NO_CHECKSUM,
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape, nbytes) in shapes.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot make {path}: {error.strerror}; name a new file") from None
    try:
        with os.fdopen(descriptor, "w+b") as file:
            _write_header(file, header)
            digest = xxhash.xxh3_128()
            for array in _arrays(session, tokens, layout, progress):
                data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
                digest.update(data.data)
                file.write(data.data)
            metadata["checksum"] = digest.hexdigest()
            file.seek(0)
            _write_header(file, header)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink()
        if isinstance(error, OSError):
            raise TierError(f"cannot write {path}: {error.strerror}; free some space") from None
        raise


def import_session(
    store: SessionStore, path: Path, name: str | None, progress: Progress | None = None
) -> str:
    """Makes a session of an exported file, under its own name or another; returns the name.

    Raises:
      UsageError: it is no such file, or there is a session of that name.
      TierError: it is damaged or of another model, or there is no room; no session is left.
    """
    header, start = read_header(path)
    metadata = header.pop("__metadata__")
    identity = Identity.from_json(metadata["identity"])
    if identity != store.identity:
        raise TierError(f"{path} was made with {store.identity.difference(identity)}; use that model")
    layout = Layout.of(identity)
    name = str(metadata["name"]) if name is None else name
    check_name(name)
    if any(info.name == name for info in store.list()):
        raise UsageError(f"there is a session {name!r} already; delete it or choose another name")
    data = np.memmap(path, np.uint8, "r", offset=start)
    stored, count = header["k.0"]["shape"][2], header["tokens"]["shape"][0]
    shapes = _shapes(layout, count, stored)
    found = {key: (value["dtype"], tuple(value["shape"])) for key, value in header.items()}
    if found != {key: shape[:2] for key, shape in shapes.items()} or len(data) != sum(
        s[2] for s in shapes.values()
    ):
        raise TierError(f"{path} is truncated or not of the shapes that it says; export the session again")
    if xxhash.xxh3_128_hexdigest(data.data) != metadata["checksum"]:
        raise TierError(f"{path} is damaged: its checksum does not fit; export the session again")

    def tensor(key: str) -> np.ndarray:
        first, last = header[key]["data_offsets"]
        dtype = "<i4" if key == "tokens" else layout.dtype
        return data[first:last].view(dtype).reshape(shapes[key][1])

    with store.open(name) as session:
        for layer in range(layout.layers):
            session.write(layer, 0, tensor(f"k.{layer}"), tensor(f"v.{layer}"))
            if progress is not None:
                progress(layer + 1, layout.layers)
        session.commit(tensor("tokens").tolist(), msgspec.json.decode(metadata["state"]), close=True)
    return name


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """An exported file's header, `__metadata__` included, and where the tensors begin.

    Raises:
      UsageError: it is not an exported session.
    """
    try:
        with open(path, "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(size, 100 << 20)))
        if header["__metadata__"]["format"] == _FORMAT:
            return header, 8 + size
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; name an exported session") from None
    except (ValueError, KeyError, TypeError, struct.error):
        pass
    raise UsageError(f"{path} is not an exported session of this version; name one that `export` wrote")


def _shapes(layout: Layout, tokens: int, stored: int) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Type, shape and bytes of every tensor, in their order in the file."""
    dtype = _DTYPES[str(layout.dtype)]
    shapes: dict[str, tuple[str, tuple[int, ...], int]] = {"tokens": ("I32", (tokens,), 4 * tokens)}
    half = stored * layout.token_bytes // 2
    for layer in range(layout.layers):
        shapes[f"k.{layer}"] = dtype, (layout.kv_heads, layout.head_dim, stored), half
        shapes[f"v.{layer}"] = dtype, (layout.kv_heads, stored, layout.head_dim), half
    return shapes


def _arrays(
    session: Session, tokens: np.ndarray, layout: Layout, progress: Progress | None
) -> Iterator[np.ndarray]:
    yield tokens
    for layer in range(layout.layers):
        yield from session.kv(layer)
        if progress is not None:
            progress(layer + 1, layout.layers)


def _write_header(file: BinaryIO, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # safetensors wants tensors aligned
    file.write(struct.pack("<Q", len(text)) + text)
