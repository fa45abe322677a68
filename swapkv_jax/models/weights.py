"""The canonical weights pytree, and filling it tensor by tensor from any checkpoint format.

Matrices keep the checkpoints' [out, in] orientation; a layer's keys are those of `layer_slots`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NotRequired, Protocol, TypedDict

import ml_dtypes
import numpy as np
import xxhash

from swapkv_jax.errors import ModelError, UsageError
from swapkv_jax.models.geometry import Geometry

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`: `total` is 0 when it is not known."""

LayerWeights = dict[str, np.ndarray]


class Weights(TypedDict):
    """`embed` [V, H], `final_norm` [H], `head` [V, H] unless tied, and one dict per layer."""

    embed: np.ndarray
    final_norm: np.ndarray
    layers: list[LayerWeights]
    head: NotRequired[np.ndarray]


@dataclass(frozen=True)
class Slot:
    """One tensor of the pytree: its key, its layer (None outside the layers) and the shape it must have."""

    key: str
    layer: int | None
    shape: tuple[int, ...]

    @property
    def label(self) -> str:
        return self.key if self.layer is None else f"layers.{self.layer}.{self.key}"


class TensorSource(Protocol):
    """A checkpoint's tensors by their own names. `read` gives floats the caller may keep."""

    @property
    def names(self) -> Collection[str]: ...

    def where(self, name: str) -> str:
        """Where the tensor is, for messages."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> np.ndarray: ...


def dtype_of(name: str) -> np.dtype:
    """The NumPy dtype called `name`. Raises UsageError for one that models cannot be held in."""
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def layer_slots(geometry: Geometry, layer: int) -> Iterator[Slot]:
    """The tensors of one layer, in the order they are read."""
    g = geometry
    queries, keys = g.heads * g.head_dim, g.kv_heads * g.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (g.hidden,),
        "q": (queries, g.hidden),
        "k": (keys, g.hidden),
        "v": (keys, g.hidden),
        "o": (g.hidden, queries),
        "post_norm": (g.hidden,),
        "gate": (g.intermediate, g.hidden),
        "up": (g.intermediate, g.hidden),
        "down": (g.hidden, g.intermediate),
    }
    if g.qkv_bias:
        shapes |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
    if g.o_bias:
        shapes |= {"o_bias": (g.hidden,)}
    if g.mlp_bias:
        shapes |= {"gate_bias": (g.intermediate,), "up_bias": (g.intermediate,), "down_bias": (g.hidden,)}
    if g.qk_norm:
        shapes |= {"q_norm": (g.head_dim,), "k_norm": (g.head_dim,)}
    for key, shape in shapes.items():
        yield Slot(key, layer, shape)


def slots(geometry: Geometry) -> Iterator[Slot]:
    """Every tensor a model of this geometry needs."""
    yield Slot("embed", None, (geometry.vocab, geometry.hidden))
    for layer in range(geometry.layers):
        yield from layer_slots(geometry, layer)
    yield Slot("final_norm", None, (geometry.hidden,))
    if not geometry.tied:
        yield Slot("head", None, (geometry.vocab, geometry.hidden))


def assemble(
    geometry: Geometry,
    source: TensorSource,
    name_of: Callable[[Slot], str],
    dtype: str,
    *,
    ignore: Callable[[str], bool] = lambda name: False,
    progress: Progress | None = None,
) -> tuple[Weights, str]:
    """Reads every tensor of `geometry` from `source`, cast to `dtype` one at a time.

    `name_of` translates a slot to the checkpoint's name; `ignore` tells which further tensors are harmless.
    Returns the weights and the xxh3-128 digest of their labels, shapes and contents. Raises ModelError for
    tensors that are missing, of the wrong shape, not finite, or that this geometry would leave unused.
    """
    target = dtype_of(dtype)
    if geometry.layers > len(source.names):  # before listing what billions of layers would need
        raise ModelError(
            f"{source.where('')}: {geometry.layers} layers configured, but only {len(source.names)} tensors; "
            "check that the configuration belongs to these weights"
        )
    wanted = {name_of(slot): slot for slot in slots(geometry)}
    if missing := [name for name in wanted if name not in source.names]:
        raise ModelError(
            f"{source.where(missing[0])}: {_listing(missing)} missing; the checkpoint is incomplete"
        )
    if unused := sorted(n for n in source.names if n not in wanted and not ignore(n)):
        raise ModelError(
            f"{source.where(unused[0])}: {_listing(unused)} not used by a {geometry.architecture} model "
            "with this configuration; check that the configuration belongs to these weights"
        )
    for name, slot in wanted.items():
        if source.shape(name) != slot.shape:
            raise ModelError(
                f"{source.where(name)}: tensor {name} has shape {list(source.shape(name))}, "
                f"the configuration asks for {list(slot.shape)}"
            )
    digest = xxhash.xxh3_128()
    layers: list[LayerWeights] = [{} for _ in range(geometry.layers)]
    outer: LayerWeights = {}
    for done, (name, slot) in enumerate(wanted.items(), start=1):
        array = _cast(source.read(name), target, f"{source.where(name)}: tensor {name}")
        digest.update(f"{slot.label}{list(array.shape)}{dtype};".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
        (outer if slot.layer is None else layers[slot.layer])[slot.key] = array
        if progress is not None:
            progress("weights", done, len(wanted))
    weights = Weights(embed=outer["embed"], final_norm=outer["final_norm"], layers=layers)
    if not geometry.tied:
        weights["head"] = outer["head"]
    return weights, digest.hexdigest()


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"tensor {names[0]}{more}"


def _cast(array: np.ndarray, target: np.dtype, what: str) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        result = np.ascontiguousarray(array.astype(target, copy=False))
    if not is_finite(result):
        if is_finite(array):
            raise ModelError(f"{what} has values beyond {target.name}'s range; use bfloat16 or float32")
        raise ModelError(f"{what} contains NaN or infinity; the checkpoint is damaged")
    return result


# Per dtype: the unsigned type of its bits, the mask of all but the sign, the pattern of infinity.
_FLOAT_BITS: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float32": (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "float64": (np.uint64, 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
}


def is_finite(array: np.ndarray, block: int = 1 << 20) -> bool:
    """Whether no value is NaN or infinite. Looks at bit patterns, `block` values at a time: bfloat16 has no
    fast `isfinite`, and a whole mask of a large matrix would double the peak memory."""
    unsigned, magnitude, infinity = _FLOAT_BITS[array.dtype.name]
    bits = np.ascontiguousarray(array).reshape(-1).view(unsigned)
    return all(
        int((bits[start : start + block] & unsigned(magnitude)).max()) < infinity
        for start in range(0, bits.size, block)
    )
