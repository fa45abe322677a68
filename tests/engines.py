"""What the engine's tests share: small models, plans that differ in one choice, decoded rows, poison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import msgspec
import numpy as np
import pytest
from tiny import TINY, tiny_checkpoint

from swapkv_jax import Engine, Plan, Sampling, load_model, make_plan
from swapkv_jax.cache.disk import DiskLayerCache
from swapkv_jax.cache.dram import PinnedLayerCache
from swapkv_jax.cache.layer import LayerCache
from swapkv_jax.cache.resident import ResidentCache
from swapkv_jax.graph import Graph
from swapkv_jax.models import Geometry, Model
from swapkv_jax.models.weights import DTYPES, Weights
from swapkv_jax.program import Program, compile_program
from swapkv_jax.staging import host_view
from swapkv_jax.tiers import DiskStore, Syscalls

LAYERS = 7  # not divisible by 2, 3 or 5
GROUP = 4
STAGED_GROUPS = 3
# A multiple of the group, of a staging piece (12 tokens) and of the pool's pages (32 tokens of float32): all
# plans then have this capacity, and their graphs may be held to the same bits.
CONTEXT = 96
CHUNKS = (20,)  # prompts of over 80 end in a chunk that reaches past the capacity

TRANSPORTS = {
    "dram-alias": {"tier": "dram", "transport": "alias"},
    "dram-copy": {"tier": "dram", "transport": "copy"},
    "disk-alias": {"tier": "disk", "transport": "alias"},
    "disk-copy": {"tier": "disk", "transport": "copy"},
}
DISK = {"staging_groups": STAGED_GROUPS, "staging_slots": 2, "record_alignment": 512}


def deep_model(directory: Path, dtype: str = "float32") -> Model:
    """The table's tiny Llama with seven layers."""
    with patch.dict(TINY, deep=replace(TINY["llama"], config={"num_hidden_layers": LAYERS})):
        return load_model(str(tiny_checkpoint("deep", directory)), dtype=dtype)


def geometry(**fields: Any) -> Geometry:
    """The sizes of the table's tiny checkpoints, but for `fields`."""
    known: dict[str, Any] = {
        "architecture": "llama",
        "layers": LAYERS,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate": 112,
        "vocab": 304,
        "norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_positions": 256,
        "tied": True,
    }
    return Geometry(**{**known, **fields})


def random_model(geometry: Geometry, dtype: str = "float32", seed: int = 0) -> Model:
    """A model of any geometry with random weights, no files and no tokenizer."""
    rng, g = np.random.default_rng(seed), geometry

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(DTYPES[dtype])

    def layer() -> dict[str, np.ndarray]:
        q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
        tensors = {
            "input_norm": 1 + matrix(g.hidden),
            "post_norm": 1 + matrix(g.hidden),
            "q": matrix(q, g.hidden),
            "k": matrix(kv, g.hidden),
            "v": matrix(kv, g.hidden),
            "o": matrix(g.hidden, q),
            "gate": matrix(g.intermediate, g.hidden),
            "up": matrix(g.intermediate, g.hidden),
            "down": matrix(g.hidden, g.intermediate),
        }
        if g.qkv_bias:
            tensors |= {"q_bias": matrix(q), "k_bias": matrix(kv), "v_bias": matrix(kv)}
        if g.qk_norm:
            tensors |= {"q_norm": 1 + matrix(g.head_dim), "k_norm": 1 + matrix(g.head_dim)}
        return tensors

    weights: Weights = {
        "embed": matrix(g.vocab, g.hidden),
        "final_norm": 1 + matrix(g.hidden),
        "layers": [layer() for _ in range(g.layers)],
    }
    if not g.tied:
        weights["head"] = matrix(g.vocab, g.hidden)
    return Model(
        geometry=geometry,
        weights=weights,
        tokenizer=None,  # type: ignore[arg-type]
        dtype=dtype,
        fingerprint=f"{seed:032x}",
        source="random",
        name="random",
        eos_token_ids=frozenset(),
    )


def resident_plan(model: Model, batch: int = 1, **fields: Any) -> Plan:
    return _plan(model, batch, {"cache": "resident", **fields})


def layer_plan(model: Model, transport: str, batch: int = 1, **fields: Any) -> Plan:
    """`transport` is a key of `TRANSPORTS`."""
    fields = {**TRANSPORTS[transport], **fields}
    return _plan(model, batch, {"cache": "layer", **(DISK if fields["tier"] == "disk" else {}), **fields})


def _plan(model: Model, batch: int, fields: dict[str, Any]) -> Plan:
    fixed = {
        "batch": batch,
        "max_context": CONTEXT,
        "dtype": model.dtype,
        "group_tokens": GROUP,
        "prefill_chunks": CHUNKS,
    }
    return make_plan(model.geometry, **{**fixed, **fields})


def compile_once(plan: Plan, geometry: Geometry, sampling: Sampling) -> Program:
    """In place of `compile_program`: plans that only differ in what no graph depends on share their graphs,
    since compiling is nearly all the time that a tiny engine takes."""
    slots = {"physical_layers": plan.physical_layers and 2, "staging_slots": plan.staging_slots and 2}
    group: dict[str, Any] = {}
    if plan.selection is not None:
        given = plan.selection
        rarely = given.lookahead == "layer-then-step" or max(given.refresh, default=1) > 1
        rarer = given.segments_select and rarely  # has a graph more
        refresh = (2,) * plan.layers if rarer else ()
        by = "step" if given.segments_select else "layer"
        choice = msgspec.structs.replace(
            given, replacement="lru", attended="kept", refresh=refresh, lookahead=by, opening_steps=1
        )
        if plan.group_tokens == 1 and choice.strategy_name == "kvswap":  # a token and the mean of one
            choice = msgspec.structs.replace(choice, summary="group")
        if choice.strategy_name == "infinigen":  # directions are arguments
            choice = msgspec.structs.replace(choice, strategy="loki")
        group = {"tier": "disk", "dram_rows": None, "selection": choice}
    alike = msgspec.structs.replace(plan, io_threads=1, **slots, **group)
    return replace(_compiled(alike, geometry, sampling), plan=plan)


@lru_cache(maxsize=32)
def _compiled(plan: Plan, geometry: Geometry, sampling: Sampling) -> Program:
    def graph(name: str, function: Callable[..., Any], arguments: Any, donate: Sequence[int]) -> Graph:
        if name not in _SHAPED:
            return Graph(name, function, arguments, donate)
        key = (name, geometry, str(arguments), tuple(donate))
        return _graphs.get(key) or _graphs.setdefault(key, Graph(name, function, arguments, donate))

    with patch("swapkv_jax.program.Graph", graph):
        return compile_program(plan, geometry, sampling)


_SHAPED = ("embed", "prefill", "take", "assign")  # of a plan these depend on nothing but their shapes
_graphs: dict[Any, Graph] = {}


def prompts_of(*lengths: int) -> list[list[int]]:
    """Random token ids; equal lengths give equal prompts."""
    return [np.random.default_rng(n).integers(4, 304, n).tolist() for n in lengths]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    tokens: list[list[int | None]]  # [T][B]
    logits: np.ndarray  # [T, B, V]; rows that were done hold whatever was computed along
    addresses: list[dict[str, int]]  # per step
    compiles: int

    def row(self, row: int) -> list[int]:
        """The tokens of one row."""
        return [token for step in self.tokens if (token := step[row]) is not None]


def decode(
    engine: Engine,
    prompts: Sequence[list[int]],
    new_tokens: int,
    *,
    finish: dict[int, int] | None = None,
    **options: Any,
) -> Decoded:
    """One generation to its end. `finish` maps a row to the step after which it is ended by hand."""
    options = {"ignore_eos": True, **options}
    generation = engine.generate(prompts, max_new_tokens=new_tokens, return_logits=True, **options)
    tokens, logits, addresses = [], [], []
    for step in generation:
        tokens.append(step.tokens)
        logits.append(step.logits)
        addresses.append(engine.addresses())
        for row, last in (finish or {}).items():
            if len(tokens) == last + 1:
                generation.finish_row(row, "by hand")
    return Decoded(
        tokens=tokens,
        logits=np.stack(logits),
        addresses=addresses,
        compiles=generation.compiles_during_decode,
    )


def assert_same(ours: Decoded, reference: Decoded, tolerance: float = 0.0) -> None:
    """Token for token; logits of rows that went on within `tolerance` (0: the same bits)."""
    assert ours.tokens == reference.tokens
    for step, tokens in enumerate(reference.tokens):
        rows = [row for row, token in enumerate(tokens) if token is not None]
        mine, theirs = ours.logits[step, rows], reference.logits[step, rows]
        assert np.isfinite(theirs).all(), f"step {step}"
        worst = np.abs(mine - theirs).max()
        assert worst <= tolerance, f"step {step}: logits differ by {worst}"


@contextmanager
def disks_through(syscalls: Syscalls) -> Iterator[None]:
    """Engines made meanwhile reach their disk store's files through `syscalls`."""

    def store(*arguments: Any, **options: Any) -> DiskStore:
        return DiskStore(*arguments, **{**options, "syscalls": syscalls})

    with patch("swapkv_jax.cache.make.DiskStore", store):
        yield


def poison(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills every KV buffer of the next generation with what must not be used: see `attend`."""
    cache = engine._cache
    if isinstance(cache, ResidentCache):
        _spoil_slots(zip(cache._k, cache._v, strict=True))
        return
    assert isinstance(cache, LayerCache)
    open_sequences, prefill_ring = cache._open_sequences, cache._prefill_ring

    def opened(*arguments: Any) -> None:
        open_sequences(*arguments)
        if isinstance(cache, DiskLayerCache):
            _spoil_slots(cache._slots)
            staged = [cache._staging.records(slot) for slot in range(len(cache._staging))]
            for records in (*staged, cache._tier.rolling.reshape(-1, cache._plan.stride_bytes)):
                records.view(cache._plan.dtype)[...] = np.nan
                _spoil(*cache._tier.parts(records))
        else:
            for k, v in zip(cache._k, cache._v, strict=True):  # type: ignore[attr-defined]
                _spoil(k, v)
        if isinstance(cache, PinnedLayerCache):
            _spoil_slots([cache._slot])

    def ring() -> Any:
        slots = prefill_ring()
        _spoil_slots(slots)
        return slots

    monkeypatch.setattr(cache, "_open_sequences", opened)
    monkeypatch.setattr(cache, "_prefill_ring", ring)


def _spoil_slots(slots: Any) -> None:
    for k, v in slots:
        _spoil(host_view(k), host_view(v))


def _spoil(k: np.ndarray, v: np.ndarray) -> None:
    k[...] = np.nan
    v[...] = ml_dtypes.finfo(v.dtype).max
