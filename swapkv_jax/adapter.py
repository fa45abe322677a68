"""The low-rank adapter of policy `group`: per layer, the directions in which keys vary most. NumPy, no JAX.

A token's keys of all KV heads, as rotated for the cache, make one vector of N = Hkv·D numbers (index h·D + d).
The r-number summary of a token, or of a group's mean key, is the product with an adapter [N, r], and a query
scored against summaries is projected by the same adapter (KVSwap, arXiv 2511.11907). `calibration` makes
adapters; this module keeps them.

On disk an adapter is a directory: `adapter.json` names the Orbax checkpoint beside it that holds the arrays,
and is replaced last, so that a reader finds the old adapter or the new one, whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np
import xxhash

from swapkv_jax.errors import ModelError, UsageError
from swapkv_jax.selection import StrategyName
from swapkv_jax.store_paths import cache_home

_RECORD = "adapter.json"
_ARRAYS = "arrays-"


class NoAdapterError(ModelError):
    """A directory without an adapter."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `adapter.json` says. `arrays` is the checkpoint's name, `checksum` is over its files."""

    version: Literal[1] = 1
    fingerprint: str
    text_digest: str
    tokens: int
    place_tokens: int = 1
    strategy: StrategyName = "kvswap"
    arrays: str
    checksum: str


@dataclass(frozen=True, eq=False)
class Adapter:
    """Top right singular vectors of uncentred post-RoPE K, per layer.

    Attributes:
      vectors: float32 [L, N, r_max], N = Hkv·D: orthonormal columns, that of the largest singular value first.
      spectrum: float64 [L, N]: the squares of all N singular values, descending.
      fingerprint: of the model whose keys these are.
      text_digest: of the calibration text, see `digest_text`. tokens: how many of its tokens were used.
      place_tokens: the keys were means over so many adjacent tokens (1: the tokens' own).
      strategy: whose directions these are. All but kvswap's are each KV head's own: D of them, head below head in
        `vectors`, the spectrum [L, D] what they are ordered by, added up over heads.
    """

    vectors: np.ndarray
    spectrum: np.ndarray
    fingerprint: str
    text_digest: str
    tokens: int
    place_tokens: int = 1
    strategy: StrategyName = "kvswap"

    def __post_init__(self) -> None:
        layers, size = self.spectrum.shape
        assert len(self.vectors) == layers, "vectors and spectrum of different shapes"
        assert self.vectors.shape[1] == size or self.strategy != "kvswap", (
            "vectors and spectrum of different shapes"
        )
        assert 1 <= self.rank <= size, "more vectors than dimensions"
        assert self.vectors.dtype == np.float32
        assert self.spectrum.dtype == np.float64

    @property
    def rank(self) -> int:
        """r_max, the largest rank that `slice` can give."""
        return self.vectors.shape[2]

    def slice(self, rank: int) -> Adapter:
        """The adapter of a lower rank: the best there is, since the vectors are sorted.

        Raises:
          UsageError: the rank is not between 1 and this adapter's.
        """
        if not 1 <= rank <= self.rank:
            raise UsageError(
                f"rank {rank} is not in this adapter, whose largest is {self.rank}; use 1 to {self.rank}, "
                f"or calibrate with a larger --rank (the model allows {self.spectrum.shape[1]})"
            )
        return replace(self, vectors=np.ascontiguousarray(self.vectors[:, :, :rank]))

    def variance_kept(self, rank: int) -> np.ndarray:
        """float64 [L]: share of the calibration keys' energy that `rank` vectors keep; any rank from 1 to N.

        Raises:
          UsageError: the rank is not between 1 and N.
        """
        size = self.spectrum.shape[1]
        if not 1 <= rank <= size:
            raise UsageError(f"keys have {size} dimensions, so no rank {rank}; use 1 to {size}")
        return self.spectrum[:, :rank].sum(axis=1) / self.spectrum.sum(axis=1)

    def save(self, directory: Path) -> None:
        """Writes the adapter into `directory` (made if missing), in place of one that may be there.

        Raises:
          ModelError: the directory cannot be written.
        """
        directory = Path(directory).absolute()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory, fcntl.LOCK_EX):
                self._write(directory)
        except OSError as error:
            raise ModelError(
                f"{directory}: cannot keep the adapter ({_reason(error)}); use a writable directory with room"
            ) from error

    def _write(self, directory: Path) -> None:
        name = f"{_ARRAYS}{uuid.uuid4().hex}"
        new = directory / f"{_RECORD}.new"
        try:
            _write_arrays(directory / name, {"vectors": self.vectors, "spectrum": self.spectrum})
            record = _Record(
                fingerprint=self.fingerprint,
                text_digest=self.text_digest,
                tokens=self.tokens,
                place_tokens=self.place_tokens,
                strategy=self.strategy,
                arrays=name,
                checksum=_checksum(directory / name),
            )
            with new.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            new.replace(directory / _RECORD)
        except BaseException:
            new.unlink(missing_ok=True)
            _remove(directory.glob(f"{name}*"))  # Orbax writes under a longer name first
            raise
        # What this one replaces, or a killed process left.
        _remove(path for path in directory.glob(f"{_ARRAYS}*") if path.name != name)

    @classmethod
    def load(cls, directory: Path, fingerprint: str) -> Self:
        """Reads the adapter in `directory`, which must be of the model with `fingerprint`.

        Raises:
          NoAdapterError: there is none.
          ModelError: it is damaged, or belongs to another model or dtype.
        """
        directory = Path(directory).absolute()
        try:
            with _locked(directory, fcntl.LOCK_SH):
                return cls._read(directory, fingerprint)
        except FileNotFoundError:
            raise NoAdapterError(
                f"{directory}: no adapter there; make one with tools/calibrate.py --out {directory}"
            ) from None
        except OSError as error:
            raise ModelError(
                f"{directory}: cannot read the adapter ({_reason(error)}); make it readable"
            ) from error

    @classmethod
    def _read(cls, directory: Path, fingerprint: str) -> Self:
        try:
            record = msgspec.json.decode((directory / _RECORD).read_bytes(), type=_Record)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _damaged(directory, f"{_RECORD}: {error}") from None
        if record.fingerprint != fingerprint:
            raise ModelError(
                f"{directory}: the adapter is for a model of fingerprint {record.fingerprint}, this model (in "
                f"this dtype) has {fingerprint}; name another directory, or replace it with tools/calibrate.py --out"
            )
        path = directory / record.arrays
        # Before Orbax sees them: it checks only part of what it reads, and where it does find an error, the
        # other array's read may outlive its event loop and complain on stderr.
        if _checksum(path) != record.checksum:
            raise _damaged(directory, f"{record.arrays} does not match its checksum")
        try:
            with _checkpointer() as checkpointer:
                arrays = checkpointer.restore(path)
        except Exception as error:  # Orbax and TensorStore errors share no base class
            raise _damaged(directory, f"{record.arrays}: {_first_line(error)}") from error
        return cls(
            vectors=np.asarray(arrays["vectors"]),
            spectrum=np.asarray(arrays["spectrum"]),
            fingerprint=record.fingerprint,
            text_digest=record.text_digest,
            tokens=record.tokens,
            place_tokens=record.place_tokens,
            strategy=record.strategy,
        )


def adapter_directory(fingerprint: str, place_tokens: int, strategy: StrategyName = "kvswap") -> Path:
    """Where the adapter of a model, for means over so many tokens' keys, is kept when no place is named."""
    name = f"means-of-{place_tokens}" if strategy == "kvswap" else strategy
    return cache_home() / "swapkv_jax" / "adapters" / fingerprint / name


def digest_text(text: str) -> str:
    """32 hex digits that identify a calibration text."""
    return xxhash.xxh3_128(text.encode()).hexdigest()


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(path, {name: np.ascontiguousarray(array) for name, array in arrays.items()})
    except Exception as error:  # Orbax and TensorStore errors share no base class
        raise ModelError(
            f"{path.parent}: cannot keep the adapter ({_first_line(error)}); use a writable directory with room"
        ) from error


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _checkpointer() -> Any:
    # Imported here: it costs most of a second, and only `group` needs it. Orbax's `v1` names for this changed
    # between its releases; this class did not.
    from orbax.checkpoint import StandardCheckpointer

    return StandardCheckpointer()


def _checksum(directory: Path) -> str:
    """XXH3-64 over the names and contents of all files below `directory`."""
    digest = xxhash.xxh3_64()
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(directory).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _damaged(directory: Path, what: str) -> ModelError:
    return ModelError(f"{directory}: damaged adapter ({what}); delete the directory to have it made again")


def _reason(error: OSError) -> str:
    return f"errno {error.errno}: {error.strerror}" if error.errno is not None else str(error)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


@contextlib.contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    """Holds the directory itself, so that reading an adapter needs no right to write."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
