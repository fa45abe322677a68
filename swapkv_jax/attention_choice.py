"""Which implementation attends the slots of policy `group`, and what each of them serves. Imports no JAX.

`xla` is XLA operations over K and V that lie apart, on any platform: K transposed, as a CPU multiplies fastest. The
kernels read packed slots instead, K and V side by side, each slot of one head a contiguous block [G, W].
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

from swapkv_jax.errors import PlanError

Attention = Literal["xla", "mosaic_tpu", "mosaic_gpu"]

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = ("float32", "bfloat16")
MAX_GROUP, MAX_REPEAT, MAX_HEADS = 16, 16, 16
LANES = 128  # of a TPU's tiles: it pads the last dimension of every array to whole ones
MIN_CAPABILITY = 9.0  # of a GPU: Hopper's asynchronous copies
MIN_JAX = (
    0,
    12,
)  # of a GPU: before, XLA put no Mosaic kernel into a command buffer, and divided the segment's in two


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
    kernels: dict[str, Attention] = {"tpu": "mosaic_tpu", "gpu": "mosaic_gpu"}
    attention = kernels.get(platform, "xla")
    if attention == "mosaic_gpu" and (capability is None or capability < MIN_CAPABILITY):
        return "xla", capability_refusal(capability)
    if attention == "mosaic_gpu" and (found := _jax_version()) < MIN_JAX:
        return (
            "xla",
            f"attention mosaic_gpu divides a CUDA graph before JAX {_dots(MIN_JAX)}; this is {_dots(found)}",
        )
    reason = refusal(
        attention,
        kv_heads=kv_heads,
        heads=heads,
        head_dim=head_dim,
        group_tokens=group_tokens,
        dtype=dtype,
    )
    return (attention, None) if reason is None else ("xla", reason)


def capability_refusal(capability: float | None) -> str:
    """Why a GPU before Hopper, or one of unknown capability, gets no kernel."""
    found = "an unknown one" if capability is None else capability
    return f"attention mosaic_gpu needs compute capability {MIN_CAPABILITY}, not {found}; use attention xla"


def refusal(
    attention: Attention, *, kv_heads: int, heads: int, head_dim: int, group_tokens: int, dtype: str
) -> str | None:
    """What a kernel does not serve, and what it does, in one line; None if it serves these sizes."""
    if attention == "xla":
        return None
    limits = {
        "dtype": (dtype, dtype in DTYPES, " or ".join(DTYPES)),
        "head_dim": (head_dim, head_dim in HEAD_DIMS, f"one of {', '.join(map(str, HEAD_DIMS))}"),
        "group_tokens": (group_tokens, 1 <= group_tokens <= MAX_GROUP, f"1 to {MAX_GROUP}"),
        "query heads per KV head": (heads // kv_heads, heads // kv_heads <= MAX_REPEAT, f"1 to {MAX_REPEAT}"),
        "kv_heads": (kv_heads, kv_heads <= MAX_HEADS, f"1 to {MAX_HEADS}"),
    }
    if attention == "mosaic_tpu":
        # Of other groups XLA makes no tiles: it would lay the pool out in another order and copy it at every call.
        sizes = [n for n in (1, 2, 4, 8, 16) if n > 1 or dtype == "float32"]
        limits["group_tokens"] = (group_tokens, group_tokens in sizes, f"one of {', '.join(map(str, sizes))}")
    for name, (value, fits, range_) in limits.items():
        if not fits:
            return f"attention {attention} serves {name} of {range_}, not {value}; use that, or attention xla"
    return None


def check_capability(attention: Attention, capability: float | None) -> None:
    """Raises PlanError if the CUDA device at hand has no such kernel. `capability`: None on other devices, for which
    lowering refuses the kernel."""
    if attention == "mosaic_gpu" and capability is not None and capability < MIN_CAPABILITY:
        raise PlanError(capability_refusal(capability))


def _jax_version() -> tuple[int, int]:
    major, minor = version("jax").split(".")[:2]
    return int(major), int(minor)


def _dots(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _whole_lanes(size: int) -> int:
    return -(-size // LANES) * LANES
