"""Prefill computed once, into files, for every policy that decodes the same prompts."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import jax
import numpy as np
import xxhash

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.models import DTYPES, Geometry, Model, Progress
from swapkv_jax.plan import DType, Plan
from swapkv_jax.planner import make_plan
from swapkv_jax.prefilled import Prompts, check_prompts
from swapkv_jax.program import compile_program
from swapkv_jax.sampling import Sampling
from swapkv_jax.staging import fetch, read_only_view, zeros

_BAR = "prefill (layers)"
_PARTS = ("k", "v", "hidden")  # one .npy file each: [L, Hkv, D, n], [L, Hkv, n, D], [H]


@dataclass(frozen=True)
class CapturedPrefill:
    """A prefill in the files that `capture` wrote, memory-mapped. A `Prefilled`.

    Attributes:
      directory: where the files are; they must stay there while this is used.
      fingerprint: the model's.
      keys: each row's name there, a digest of model and prompt.
    """

    directory: Path
    fingerprint: str
    keys: tuple[str, ...]
    _rows: tuple[tuple[np.ndarray, ...], ...]  # as _PARTS

    @classmethod
    def open(cls, directory: Path, model: Model, prompts: Prompts) -> CapturedPrefill:
        """The prefill of `prompts` by `model` that was captured in `directory`.

        Raises:
          UsageError: a prompt's is not there. TierError: a file is damaged or cannot be read.
        """
        keys = tuple(_key(model, prompt) for prompt in prompts)
        if missing := [row + 1 for row, key in enumerate(keys) if not _captured(directory, key)]:
            raise UsageError(
                f"{directory} holds no prefill of prompt {missing[0]} by {model.name} in {model.dtype} "
                f"({len(missing)} of {len(keys)} prompts are missing); capture it first"
            )
        rows = (_map(directory, key, model, len(prompt)) for key, prompt in zip(keys, prompts, strict=True))
        return cls(directory, model.fingerprint, keys, tuple(rows))

    def select(self, rows: Iterable[int]) -> CapturedPrefill:
        """These rows, in this order."""
        chosen = list(rows)
        return CapturedPrefill(
            self.directory,
            self.fingerprint,
            tuple(self.keys[row] for row in chosen),
            tuple(self._rows[row] for row in chosen),
        )

    def check(self, model: Model, prompts: Prompts) -> None:
        if model.fingerprint != self.fingerprint:
            raise UsageError(
                f"the prefill captured in {self.directory} is not by {model.name} in {model.dtype}; capture it anew"
            )
        if self.keys != tuple(_key(model, prompt) for prompt in prompts):
            raise UsageError(
                f"the prefill captured in {self.directory} is of other prompts, or of these in another order; "
                "select its rows in the order of the prompts"
            )

    def kv(self, row: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        k, v, _ = self._rows[row]
        return k[layer], v[layer]

    def hidden(self, row: int) -> np.ndarray:
        return self._rows[row][2]


def capture(
    model: Model,
    prompts: Prompts,
    directory: Path,
    *,
    like: Plan | None = None,
    progress: Progress | None = None,
) -> CapturedPrefill:
    """Prefills every prompt once, into `capture_bytes` of files. A prompt that `directory` has already is not
    computed again: what was interrupted goes on where it was.

    Memory, besides the weights: one prompt's activations and one layer's KV.

    Args:
      directory: made if it does not exist; may hold any number of prompts and models.
      like: the plan whose own prefill to repeat to the bit, with its chunks and capacity (default: those of a
        plan for the longest prompt; another plan's prefill differs from them by rounding alone).
      progress: called as (what, layers of prompts done, in all).
    Raises:
      UsageError: a prompt is empty, holds an unknown id or is too long; `directory` cannot be made.
      TierError: there is no room, or a file cannot be written or read.
    """
    check_prompts(prompts, model.geometry.vocab)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise UsageError(
            f"cannot make the capture directory {directory}: {error.strerror}; choose another"
        ) from None
    named = {_key(model, prompt): prompt for prompt in prompts}
    missing = {key: prompt for key, prompt in named.items() if not _captured(directory, key)}
    needed = capture_bytes(model.geometry, model.dtype, map(len, missing.values()))
    if needed > free:
        raise TierError(
            f"{directory} has {free} bytes free, {len(missing)} captured prefills take {needed}; make room, or "
            "choose another directory"
        )
    if missing:
        _compute(model, missing, directory, like, progress)
    return CapturedPrefill.open(directory, model, prompts)


def capture_bytes(geometry: Geometry, dtype: str, lengths: Iterable[int]) -> int:
    """Bytes of K, V and hidden state of prompts of `lengths` tokens (file headers left out)."""
    itemsize = DTYPES[dtype].itemsize
    return sum(n * geometry.kv_bytes_per_token(itemsize) + geometry.hidden * itemsize for n in lengths)


def _compute(
    model: Model,
    prompts: Mapping[str, Sequence[int]],
    directory: Path,
    like: Plan | None,
    progress: Progress | None,
) -> None:
    geometry = model.geometry
    longest = max(map(len, prompts.values()))
    plan = make_plan(
        geometry,
        cache="resident",
        max_context=longest if like is None else max(longest, like.capacity),
        dtype=cast(DType, model.dtype),
        layers_per_segment=1,  # the decode graphs are not used here, so the one that compiles fastest
        **(
            {} if like is None else {"prefill_chunks": like.prefill_chunks, "group_tokens": like.group_tokens}
        ),
    )
    program = compile_program(plan, geometry, Sampling())
    params = jax.tree.map(jax.device_put, model.params)
    k, v = (zeros(shape, plan.dtype) for shape in plan.layer_shapes(1))
    done, total = 0, len(prompts) * geometry.layers
    for key, prompt in prompts.items():
        length = len(prompt)
        hidden = program.embed_prompt(params["embed"], prompt)
        with _new_files(directory, key) as (k_file, v_file, hidden_file):
            _begin(k_file, (geometry.layers, geometry.kv_heads, geometry.head_dim, length), plan.dtype)
            _begin(v_file, (geometry.layers, geometry.kv_heads, length, geometry.head_dim), plan.dtype)
            for layer in params["layers"]:
                # Every layer may use the same K and V: prefill reads only what it has written for this prompt.
                hidden, k, v = program.prefill_layer(layer, hidden, k, v, 0, length)
                _add(k_file, read_only_view(k)[0, :, :, :length])
                _add(v_file, read_only_view(v)[0, :, :length])
                done += 1
                if progress is not None:
                    progress(_BAR, done, total)
            start, _ = program.chunks(length)[-1]
            _begin(hidden_file, (geometry.hidden,), plan.dtype)
            _add(hidden_file, fetch(hidden[-1])[length - 1 - start])


# ---- files ---------------------------------------------------------------------------------------------


def _key(model: Model, prompt: Sequence[int]) -> str:
    digest = xxhash.xxh3_128(model.fingerprint.encode())
    digest.update(np.asarray(prompt, "<i4").tobytes())
    return digest.hexdigest()


def _paths(directory: Path, key: str) -> list[Path]:
    return [directory / f"{key}.{part}.npy" for part in _PARTS]


def _captured(directory: Path, key: str) -> bool:
    return all(path.is_file() for path in _paths(directory, key))


@contextlib.contextmanager
def _new_files(directory: Path, key: str) -> Iterator[list[IO[bytes]]]:
    """A prompt's files under other names, which become theirs once everything is in them."""
    suffix = f".{os.getpid()}-{secrets.token_hex(4)}"
    paths = _paths(directory, key)
    unfinished = [path.with_name(path.name + suffix) for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            files: list[IO[bytes]] = [stack.enter_context(path.open("wb")) for path in unfinished]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for path, final in zip(unfinished, paths, strict=True):
            path.rename(final)
    except OSError as error:
        raise TierError(
            f"cannot write a captured prefill in {directory}: {error.strerror} (errno {error.errno}); make room, "
            "or choose another directory"
        ) from error
    finally:
        for path in unfinished:
            path.unlink(missing_ok=True)


def _stored_dtype(dtype: str) -> np.dtype:
    """bfloat16 as its bits: .npy files know NumPy's own types only."""
    return DTYPES[dtype] if DTYPES[dtype].kind == "f" else np.dtype(np.uint16)


def _begin(file: IO[bytes], shape: tuple[int, ...], dtype: str) -> None:
    descr = np.lib.format.dtype_to_descr(_stored_dtype(dtype))
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})


def _add(file: IO[bytes], values: np.ndarray) -> None:
    file.write(np.ascontiguousarray(values).view(np.uint8).data)


def _map(directory: Path, key: str, model: Model, length: int) -> tuple[np.ndarray, ...]:
    """A row's parts, read-only and mapped, in the model's dtype."""
    g = model.geometry
    shapes = (
        (g.layers, g.kv_heads, g.head_dim, length),
        (g.layers, g.kv_heads, length, g.head_dim),
        (g.hidden,),
    )
    parts = []
    for path, shape in zip(_paths(directory, key), shapes, strict=True):
        try:
            part = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise TierError(f"{path} cannot be read ({error}); delete it and capture again") from None
        if part.shape != shape or part.dtype != _stored_dtype(model.dtype):
            raise TierError(
                f"{path} holds {part.dtype} {list(part.shape)} instead of {model.dtype} {list(shape)}; delete it and "
                "capture again"
            )
        parts.append(part.view(DTYPES[model.dtype]))
    return tuple(parts)
