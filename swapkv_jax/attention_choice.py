"""Which implementation attends the slots of policy `group`, and what each of them serves. Imports no JAX.

`xla` is XLA operations over K and V that lie apart, on any platform: K transposed, as a CPU multiplies fastest. The
kernels read packed slots instead, K and V side by side, each slot of one head a contiguous block [G, W].
`mosaic_hopper` reads the same slots as `mosaic_gpu`, and multiplies them with the tensor cores of one generation.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal

from swapkv_jax.errors import PlanError

Attention = Literal["xla", "mosaic_tpu", "mosaic_gpu", "mosaic_hopper"]

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = ("float32", "bfloat16")
MAX_GROUP, MAX_REPEAT, MAX_HEADS = 16, 16, 16
LANES = 128  # of a TPU's tiles: it pads the last dimension of every array to whole ones
MIN_CAPABILITY = 9.0  # of a GPU: Hopper's asynchronous copies
HOPPER = (9.0, 10.0)  # capabilities from and below which a GPU has Hopper's products of tensor cores
HOPPER_HEAD_DIMS, HOPPER_GROUPS, HOPPER_DTYPES = (
    (64, 128, 256),
    (8, 16),
    ("bfloat16",),
)  # whole tiles of theirs
MIN_JAX = (
    0,
    12,
)  # of a GPU: before, XLA put no Mosaic kernel into a command buffer, and divided the segment's in two
_KERNELS: dict[str, tuple[Attention, ...]] = {  # of a platform, the first that serves
    "tpu": ("mosaic_tpu",),
    "gpu": ("mosaic_hopper", "mosaic_gpu"),
}


def slot_width(attention: Attention, head_dim: int) -> int:
    """W, the values of a packed token: K, V, and on a TPU what fills its last tile, which it would take anyway."""
    return _whole_lanes(2 * head_dim) if attention == "mosaic_tpu" else 2 * head_dim


def query_columns(attention: Attention, columns: int) -> int:
    """Columns of a layer's query weights as they are kept for the selection, with what a TPU would pad them by."""
    return _whole_lanes(columns) if attention == "mosaic_tpu" else columns


def default_attention(
    platform: str,
    *,
    kv_heads: int,
    heads: int,
    head_dim: int,
    group_tokens: int,
    dtype: str,
    capability: float | None = None,
) -> tuple[Attention, str | None]:
    """The kernel of a platform ("cpu", "gpu" or "tpu") if it serves these sizes, else `xla`; and why not the kernel.

    Args:
      capability: a GPU's compute capability; None is unknown, and gets `xla`.
    """
    reason = None
    for attention in _KERNELS.get(platform, ()):
        reason = (
            _device_refusal(attention, capability)
            or _version_refusal(attention)
            or refusal(
                attention,
                kv_heads=kv_heads,
                heads=heads,
                head_dim=head_dim,
                group_tokens=group_tokens,
                dtype=dtype,
            )
        )
        if reason is None:
            return attention, None
    return "xla", reason


def why_xla(attention: Attention, platform: str, **sizes: Any) -> str | None:
    """Why a plan's slots are attended by `xla` on a platform that has kernels; None for a kernel, and where there are
    none. `sizes`: as for `default_attention`."""
    if attention != "xla" or platform not in _KERNELS:
        return None
    default, reason = default_attention(platform, **sizes)
    return reason or f"the plan asks for it, where {default} would serve"


def _device_refusal(attention: Attention, capability: float | None) -> str | None:
    """Why a GPU has no such kernel: it is of another generation, or of an unknown one."""
    if attention not in _KERNELS["gpu"]:
        return None
    found = "an unknown one" if capability is None else capability
    if attention == "mosaic_hopper" and not (capability is not None and HOPPER[0] <= capability < HOPPER[1]):
        return (
            f"attention {attention} needs compute capability {HOPPER[0]} (Hopper), not {found}; use attention "
            "mosaic_gpu on newer GPUs, else xla"
        )
    if capability is None or capability < MIN_CAPABILITY:
        return (
            f"attention {attention} needs compute capability {MIN_CAPABILITY}, not {found}; use attention xla"
        )
    return None


def _version_refusal(attention: Attention) -> str | None:
    if attention not in _KERNELS["gpu"] or (found := _jax_version()) >= MIN_JAX:
        return None
    return f"attention {attention} divides a CUDA graph before JAX {_dots(MIN_JAX)}; this is {_dots(found)}"


def refusal(
    attention: Attention, *, kv_heads: int, heads: int, head_dim: int, group_tokens: int, dtype: str
) -> str | None:
    """What a kernel does not serve, and what it does, in one line; None if it serves these sizes."""
    if attention == "xla":
        return None
    dtypes, dims, groups = DTYPES, HEAD_DIMS, tuple(range(1, MAX_GROUP + 1))
    if attention == "mosaic_tpu":
        # Of other groups XLA makes no tiles: it would lay the pool out in another order and copy it at every call.
        groups = (1, 2, 4, 8, 16) if dtype == "float32" else (2, 4, 8, 16)
    elif attention == "mosaic_hopper":
        dtypes, dims, groups = HOPPER_DTYPES, HOPPER_HEAD_DIMS, HOPPER_GROUPS
    repeat = heads // kv_heads
    limits = {
        "dtype": (dtype, dtype in dtypes, " or ".join(dtypes)),
        "head_dim": (head_dim, head_dim in dims, _one_of(dims)),
        "group_tokens": (group_tokens, group_tokens in groups, _one_of(groups)),
        "query heads per KV head": (repeat, repeat <= MAX_REPEAT, f"1 to {MAX_REPEAT}"),
        "kv_heads": (kv_heads, kv_heads <= MAX_HEADS, f"1 to {MAX_HEADS}"),
    }
    for name, (value, fits, range_) in limits.items():
        if not fits:
            return f"attention {attention} serves {name} of {range_}, not {value}; use that, or attention xla"
    return None


def check_capability(attention: Attention, capability: float | None) -> None:
    """Raises PlanError if the CUDA device at hand has no such kernel. `capability`: None on other devices, for which
    lowering refuses the kernel."""
    reason = None if capability is None else _device_refusal(attention, capability)
    if reason is not None:
        raise PlanError(reason)


def _one_of(values: tuple[int, ...]) -> str:
    if len(values) > 2 and values == tuple(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    return f"one of {', '.join(map(str, values))}"


def _jax_version() -> tuple[int, int]:
    major, minor = version("jax").split(".")[:2]
    return int(major), int(minor)


def _dots(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _whole_lanes(size: int) -> int:
    return -(-size // LANES) * LANES
