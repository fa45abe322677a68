"""Calibration: the adapter of a model, by singular value decomposition of the keys a text gives rise to.

The keys come out of the prefill graphs that decode with any policy uses, so they are the cache's own: after
the key norm, bias and RoPE, in the model's dtype. Only each layer's Gram matrix KᵀK is kept of them; its
eigenvectors are K's right singular vectors.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import jax
import numpy as np

from swapkv_jax.adapter import Adapter, NoAdapterError, adapter_directory, digest_text
from swapkv_jax.errors import ModelError, UsageError
from swapkv_jax.models import Model
from swapkv_jax.models.weights import Progress
from swapkv_jax.plan import DType
from swapkv_jax.planner import make_plan
from swapkv_jax.program import compile_program
from swapkv_jax.sampling import Sampling
from swapkv_jax.selection import StrategyName
from swapkv_jax.staging import read_only_view, zeros

# Windows as long as the contexts to come: RoPE turns keys where short windows never look (SmolLM2, 7,680
# tokens: a fifth less divergence with windows of 8,192 than of 2,048).
TOKENS, WINDOW = 16_384, 8_192
# KVSwap's most generous setting is an eighth of N = 1,024. More than this is only worth its bytes in tests.
LARGEST_DEFAULT_RANK = 256
_CHARACTERS_PER_TOKEN = 16  # more than text has, so that a huge file is not tokenised to its end
_BAR = "calibrate (layers)"


def calibrate(
    model: Model,
    text: str,
    *,
    tokens: int = TOKENS,
    window: int = WINDOW,
    rank: int | None = None,
    place_tokens: int = 1,
    progress: Progress | None = None,
) -> Adapter:
    """The adapter of `model` for the keys of the first `tokens` tokens of `text`.

    The text is cut into windows, each a prompt of its own at positions 0 to `window` - 1; the last window may
    be shorter and counts like the others. Memory, besides the weights: one window's activations, one layer's
    KV and L·N² float64 (N = Hkv·D), whatever the number of tokens.

    Args:
      tokens: at most; a shorter text is used whole.
      window: tokens per window, at most: a model with a shorter context takes windows of that length.
      rank: vectors to keep per layer (default: N, but no more than 256).
      place_tokens: adapt to the mean keys of so many adjacent tokens; what is left of a window counts for nothing.
      progress: called as (what, layers of windows done, in all).
    Raises:
      UsageError: a number that cannot work, or a text with fewer tokens than `rank`.
      ModelError: keys that are not finite in the model's dtype.
    """
    (adapter,) = calibrate_all(
        model, text, [place_tokens], tokens=tokens, window=window, rank=rank, progress=progress
    )
    return adapter


def calibrate_all(
    model: Model,
    text: str,
    places: Sequence[int],
    *,
    tokens: int = TOKENS,
    window: int = WINDOW,
    rank: int | None = None,
    progress: Progress | None = None,
) -> list[Adapter]:
    """As `calibrate`, an adapter for each of `places` (`place_tokens`) from one prefill, which takes nearly all the
    time. L·N² float64 of memory for each."""
    geometry = model.geometry
    size = geometry.kv_heads * geometry.head_dim
    if rank is None:
        rank = min(size, LARGEST_DEFAULT_RANK)
    if not 1 <= rank <= size:
        raise UsageError(f"rank {rank} is not possible: keys have {size} dimensions; use 1 to {size}")
    for place_tokens in places:
        if place_tokens < 1 or window < place_tokens:
            raise UsageError(
                f"windows of {window} tokens cannot be cut into places of {place_tokens}; use at least 1 of each, "
                "and windows no shorter than places"
            )
    ids = encode(model, text, tokens)
    window = min(window, max(1, len(ids)), geometry.context_limit)
    windows = [ids[i : i + window] for i in range(0, len(ids), window)]
    for place_tokens in places:
        if sum(len(part) // place_tokens for part in windows) < rank:
            each = f", {place_tokens} to a mean key," if place_tokens > 1 else ""
            raise UsageError(
                f"{len(ids)} tokens of calibration text{each} in windows of {window} cannot fill {rank} dimensions; "
                "give a longer text, more tokens, longer windows or a lower rank"
            )
    adapters = []
    for place_tokens, grams in zip(
        places, _gram_matrices(model, windows, window, places, progress), strict=True
    ):
        vectors = np.empty((geometry.layers, size, rank), np.float32)
        spectrum = np.empty((geometry.layers, size), np.float64)
        for layer, gram in enumerate(grams):
            spectrum[layer], vectors[layer] = _decompose(gram, rank)
        adapters.append(
            Adapter(
                vectors=vectors,
                spectrum=spectrum,
                fingerprint=model.fingerprint,
                text_digest=digest_text(text),
                tokens=len(ids),
                place_tokens=place_tokens,
            )
        )
    return adapters


def ensure_adapter(
    model: Model,
    *,
    place_tokens: int = 1,
    strategy: StrategyName = "kvswap",
    make: Callable[..., Adapter] | None = None,
    directory: Path | None = None,
    text: str | None = None,
    progress: Progress | None = None,
) -> tuple[Adapter, str]:
    """The adapter kept for `model`, calibrated and saved first if need be, and a note that says which it was.

    Of several processes that need it, one calibrates while the others wait for it.

    Args:
      place_tokens: tokens whose mean keys it is for, see `calibrate`.
      strategy: whose directions it must hold. make: what calibrates them, called as make(model, text, progress=…)
        (default: `calibrate`, which is kvswap's).
      directory: where it is kept (default: by fingerprint in the user's cache).
      text: what it must have been calibrated on; None takes a saved one of any text, and `default_text()`
        where none is saved.
    Raises:
      UsageError: see `calibrate`.
      ModelError: the place cannot be used, or holds a damaged adapter or another model's. (In the user's
        cache such an adapter is replaced.)
    """
    default = adapter_directory(model.fingerprint, place_tokens, strategy)
    make = partial(calibrate, place_tokens=place_tokens) if make is None else make
    place = default if directory is None else Path(directory)
    digest = None if text is None else digest_text(text)
    wanted = (model.fingerprint, place_tokens, digest, strategy)
    adapter, why = _saved(place, *wanted, replaceable=directory is None)
    if adapter is None:
        with _calibrating(place):
            # Another process may have made it while this one waited.
            adapter, why = _saved(place, *wanted, replaceable=directory is None)
            if adapter is None:
                adapter = make(model, default_text() if text is None else text, progress=progress)
                adapter.save(place)
                what = "the default text" if text is None else "the given text"
                return (
                    adapter,
                    f"adapter: calibrated on {adapter.tokens} tokens of {what} ({why}), kept in {place}",
                )
    return adapter, f"adapter: loaded from {place} (calibrated on {adapter.tokens} tokens)"


def ensure_adapters(
    model: Model, places: Sequence[int], *, progress: Progress | None = None
) -> tuple[dict[int, Adapter], str]:
    """The adapters kept for `model` in the user's cache, by `place_tokens`. Those that are missing are calibrated on
    `default_text()`, together, and saved; the note says which.

    Raises:
      UsageError: see `calibrate`. ModelError: the cache cannot be written.
    """
    at = {place: adapter_directory(model.fingerprint, place) for place in sorted(set(places))}
    found: dict[int, Adapter] = {}
    with contextlib.ExitStack() as stack:
        for place, directory in at.items():
            stack.enter_context(_calibrating(directory))
            adapter, _ = _saved(directory, model.fingerprint, place, None, replaceable=True)
            if adapter is not None:
                found[place] = adapter
        missing = [place for place in at if place not in found]
        if missing:
            for adapter in calibrate_all(model, default_text(), missing, progress=progress):
                adapter.save(at[adapter.place_tokens])
                found[adapter.place_tokens] = adapter
    made = ", ".join(map(str, missing)) or "none"
    return found, f"adapters for means of {', '.join(map(str, at))} tokens; calibrated now: {made}"


def default_text() -> str:
    """English prose that every Python has: the topics of its `help()`, sorted by name (over 400 kB)."""
    # Imported here: half a megabyte that only this function needs.
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def encode(model: Model, text: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of the text, or all there are. UsageError: `tokens` is not positive."""
    if tokens < 1:
        raise UsageError(f"tokens must be at least 1, not {tokens}")
    ids: list[int] = []
    for characters in (tokens * _CHARACTERS_PER_TOKEN, len(text)):
        ids = model.tokenizer.encode(text[:characters], chat=False)
        if len(ids) >= tokens or characters >= len(text):
            break
    return ids[:tokens]


def _gram_matrices(
    model: Model,
    windows: Sequence[list[int]],
    capacity: int,
    places: Sequence[int],
    progress: Progress | None,
) -> np.ndarray:
    """float64 [len(places), L, N, N]: KᵀK of each layer, summed over all windows' places of so many tokens."""
    geometry = model.geometry
    plan = make_plan(
        geometry,
        cache="resident",
        max_context=capacity,
        dtype=cast(DType, model.dtype),
        layers_per_segment=1,  # the decode graphs are not used here, so the one that compiles fastest
    )
    program = compile_program(plan, geometry, Sampling())
    params = jax.tree.map(jax.device_put, model.params)
    k, v = (zeros(shape, plan.dtype) for shape in plan.layer_shapes(1))
    size = geometry.kv_heads * geometry.head_dim
    grams = np.zeros((len(places), geometry.layers, size, size), np.float64)
    done, total = 0, len(windows) * geometry.layers
    for ids in windows:
        hidden = program.embed_prompt(params["embed"], ids)
        for layer in range(geometry.layers):
            # Every layer may use the same K and V: prefill reads only what it has written for this window.
            hidden, k, v = program.prefill_layer(params["layers"][layer], hidden, k, v, 0, len(ids))
            keys = read_only_view(k)[0].reshape(size, -1)[:, : len(ids)].astype(np.float64)
            for grams_of_place, place_tokens in zip(grams, places, strict=True):
                count = len(ids) // place_tokens
                means = keys[:, : count * place_tokens].reshape(size, count, place_tokens).mean(axis=2)
                grams_of_place[layer] += means @ means.T
            if not (np.isfinite(grams[:, layer]).all() and keys.any()):
                raise ModelError(
                    f"layer {layer}: keys are all zero or not finite in {model.dtype}; "
                    "calibrate in float32, or check the weights"
                )
            done += 1
            if progress is not None:
                progress(_BAR, done, total)
    return grams


def _decompose(gram: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues [N], largest first, and the first `rank` eigenvectors [N, rank], of settled sign."""
    values, vectors = np.linalg.eigh(gram)
    return np.maximum(values[::-1], 0.0), settled(vectors[:, ::-1][:, :rank])


def settled(vectors: np.ndarray) -> np.ndarray:
    """Directions [.., N, r] float32, turned so that the largest number of each is positive."""
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=-2, keepdims=True), axis=-2)
    return (vectors * np.sign(largest)).astype(np.float32)


def _saved(
    place: Path,
    fingerprint: str,
    place_tokens: int,
    text_digest: str | None,
    strategy: StrategyName = "kvswap",
    *,
    replaceable: bool,
) -> tuple[Adapter | None, str]:
    """The adapter in `place` if it will do, else None and why not."""
    try:
        adapter = Adapter.load(place, fingerprint)
    except NoAdapterError:
        return None, "none was saved"
    except ModelError as error:
        if not replaceable:
            raise
        return None, f"the saved one was of no use: {error}"
    if adapter.strategy != strategy:
        return None, f"the saved one was for strategy {adapter.strategy}"
    if adapter.place_tokens != place_tokens:
        return None, f"the saved one was for means of {adapter.place_tokens} tokens"
    if text_digest not in (None, adapter.text_digest):
        return None, "the saved one was of another text"
    return adapter, ""


@contextlib.contextmanager
def _calibrating(place: Path) -> Iterator[None]:
    """One process at a time. Apart from the adapter's own lock, which readers of an older one may hold."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = (place / "calibrating.lock").open("w")
    except OSError as error:
        raise ModelError(
            f"{place}: cannot keep an adapter there ({error.strerror}); "
            "make it writable, or set XDG_CACHE_HOME to a writable directory"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
