"""One way in: what gather attention computes, on which platform by which implementation."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from swapkv_jax.attention_choice import DTYPES, HEAD_DIMS, MAX_GROUP, MAX_HEADS, MAX_REPEAT, refusal
from swapkv_jax.errors import UsageError

from ..platforms import require_platform
from .mosaic_gpu import gather_attention_gpu
from .mosaic_hopper import gather_attention_hopper
from .mosaic_tpu import gather_attention_tpu
from .reference import gather_attention_xla

Backend = Literal["auto", "xla", "mosaic_tpu", "mosaic_gpu", "mosaic_hopper"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@partial(jax.jit, static_argnames=("backend", "interpret"))
def gather_attention(
    q: Float[Array, "B Hkv R D"],
    pool: Float[Array, "B Hkv C G W"],
    slots: Int[Array, "B M"],
    valid: Bool[Array, "B M"],
    rolling: Float[Array, "B Hkv G W"],
    newest: Int[Array, " B"],
    *,
    backend: Backend = "auto",
    interpret: Any = False,
) -> tuple[Float[Array, "B Hkv R D"], Float[Array, "B Hkv R"]]:
    """Each row's queries over the tokens of its selected slots and over its rolling buffer's tokens 0 … `newest`.

    What is not selected takes no part, whatever is there, even NaN: slots that no valid entry names, entries that
    are not valid, rolling tokens beyond `newest`. Scores are scaled by D ** -0.5; softmax and sums are float32. Two
    results over different tokens join by their log-sum-exps.

    A token's K and V lie side by side, K in the first D of W ≥ 2·D values and V in the next D, so that a slot of one
    head is one contiguous block [G, W], which a kernel copies at once. Values beyond 2·D must be finite. The engine's
    CPU path lays K out as [B, Hkv, D, C·G] apart from V instead and attends every slot in use where it lies: there
    no copy is made at all, and a transposed K is what a CPU multiplies fastest. Here only selected slots are read.

    On a TPU the pool must lie in the order of its dimensions. XLA gives it another, and copies the whole pool at
    every call, unless W is a multiple of 128 and G 2, 4, 8, 16, or with float32 1.

    Args:
      q: queries, R per KV head; float32 or bfloat16, like the pool and the rolling buffer.
      pool: C slots of G tokens each.
      slots: int32, the selected slots; where `valid`, each in 0 … C-1 and no more than once a row. Not checked.
      valid: which entries of `slots` count; a row may have none.
      rolling: the newest tokens, which do not fill a group yet.
      newest: int32, index of a row's newest rolling token; -1 if there is none.
      backend: `auto` is the Mosaic kernel on TPU and CUDA devices and XLA operations elsewhere, chosen when the
        program is lowered. A kernel asked for by name refuses to be lowered for another platform. CUDA devices
        before Hopper have no such kernel: ask for `xla` there. `mosaic_hopper` is for Hopper alone, bfloat16, G 8 or
        16, D 64, 128 or 256 and W a multiple of 64; `auto`, which does not know a CUDA device's generation, never
        takes it.
      interpret: interprets the named kernel, which any platform can: True, or one of the interpreters in
        `kernels.versions`. For tests.

    Returns:
      The attended values, of q's dtype, and the scores' log-sum-exp, float32. A row with nothing to attend gets
      zeros and -inf.

    Raises:
      UsageError: an unknown backend, sizes or dtypes that the kernels do not serve, a kernel off its platform.
    """
    operands = (q, pool, slots, valid, rolling, newest)
    _check(*operands, backend=backend)
    if interpret and backend not in _KERNELS:
        raise UsageError(
            f"interpret=True needs a kernel, not backend {backend!r}: name one of {', '.join(_KERNELS)}"
        )
    if backend == "auto":
        return jax.lax.platform_dependent(
            *operands, tpu=gather_attention_tpu, cuda=gather_attention_gpu, default=gather_attention_xla
        )
    if backend == "xla":
        return gather_attention_xla(*operands)
    kernel, platform = _KERNELS[backend]
    if not interpret:
        operands = (require_platform(q, platform, backend), *operands[1:])
    return kernel(*operands, interpret=interpret)


_KERNELS: dict[str, tuple[Any, Any]] = {
    "mosaic_tpu": (gather_attention_tpu, "tpu"),
    "mosaic_gpu": (gather_attention_gpu, "cuda"),
    "mosaic_hopper": (gather_attention_hopper, "cuda"),
}


def _check(q, pool, slots, valid, rolling, newest, *, backend: str) -> None:
    """Raises UsageError naming the first argument that does not fit the others or the kernels."""
    if backend not in BACKENDS:
        raise UsageError(f"backend {backend!r} is unknown: use one of {', '.join(BACKENDS)}")
    if q.ndim != 4 or pool.ndim != 5 or slots.ndim != 2 or pool.shape[-1] < 2 * q.shape[-1]:
        raise UsageError(
            f"q {q.shape}, pool {pool.shape}, slots {slots.shape}: want [B, Hkv, R, D], [B, Hkv, C, G, W] with W at "
            "least 2·D, [B, M]"
        )
    batch, heads, repeat, dim = q.shape
    slots_held, tokens, width = pool.shape[2:]
    wanted = {
        "pool": (pool, (batch, heads, slots_held, tokens, width), q.dtype),
        "slots": (slots, (batch, slots.shape[1]), jnp.int32),
        "valid": (valid, (batch, slots.shape[1]), jnp.bool_),
        "rolling": (rolling, (batch, heads, tokens, width), q.dtype),
        "newest": (newest, (batch,), jnp.int32),
    }
    for name, (array, shape, dtype) in wanted.items():
        if array.shape != shape or array.dtype != dtype:
            raise UsageError(
                f"{name} is {array.dtype}{list(array.shape)}; with q {q.dtype}{list(q.shape)} it must be "
                f"{jnp.dtype(dtype)}{list(shape)}"
            )
    limits = {
        "dtype": (str(q.dtype), str(q.dtype) in DTYPES, " or ".join(DTYPES)),
        "head dim D": (dim, dim in HEAD_DIMS, f"one of {HEAD_DIMS}"),
        "group tokens G": (tokens, 1 <= tokens <= MAX_GROUP, f"1 to {MAX_GROUP}"),
        "queries per KV head R": (repeat, 1 <= repeat <= MAX_REPEAT, f"1 to {MAX_REPEAT}"),
        "KV heads Hkv": (heads, 1 <= heads <= MAX_HEADS, f"1 to {MAX_HEADS}"),
        "selected slots M": (slots.shape[1], slots.shape[1] >= 1, "at least 1"),
    }
    for name, (value, fits, range_) in limits.items():
        if not fits:
            raise UsageError(f"{name} is {value}; gather attention serves {range_}")
    if backend == "mosaic_hopper":
        reason = refusal(
            backend,
            kv_heads=heads,
            heads=heads * repeat,
            head_dim=dim,
            group_tokens=tokens,
            dtype=str(q.dtype),
        )
        if reason is None and width % 64:
            reason = (
                f"attention {backend} serves W of a multiple of 64, not {width}; use that, or attention xla"
            )
        if reason is not None:
            raise UsageError(reason)
