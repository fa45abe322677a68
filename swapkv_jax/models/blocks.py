"""The decoder block as flax.nnx modules, split once into pure functions over pytrees of arrays.

A block is used in two halves because attention belongs to the cache policy: `project` makes the rotated
query and the new K/V, `finish` takes what attention made of them. Shapes below: N tokens (rows of a decode
batch, or one row's prefill chunk), Hkv KV heads, R query heads per KV head, D head dim, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from swapkv_jax.models.geometry import Geometry
from swapkv_jax.models.products import multiply
from swapkv_jax.models.rope import attention_scaling, dynamic_base, frequencies_of_base, inv_freq

Params = dict[str, Any]


def rms_norm(x: Float[Array, "... F"], scale: Float[Array, " F"], eps: float) -> Float[Array, "... F"]:
    """Root-mean-square norm, computed in float32 and scaled in the input's dtype as checkpoints expect."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale


class RMSNorm(nnx.Module):
    """`rms_norm` with its scale. (flax's own promotes dtypes implicitly, which strict promotion forbids.)"""

    def __init__(self, features: int, eps: float, dtype: jnp.dtype):
        self.scale = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "... F"]) -> Float[Array, "... F"]:
        return rms_norm(x, self.scale[...], self.eps)


class Linear(nnx.Module):
    """A product with weights [outputs, inputs], and what is added to it, if anything. (flax's own has weights
    [inputs, outputs], which a CPU multiplies more slowly.)"""

    def __init__(self, inputs: int, outputs: int, dtype: jnp.dtype, *, bias: bool):
        self.kernel = nnx.Param(jnp.zeros((outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "N inputs"]) -> Float[Array, "N outputs"]:
        y = multiply(self.kernel[...], x)
        return y if self.bias is None else y + self.bias[...]


class DecoderBlock(nnx.Module):
    """One pre-norm decoder layer; Q, K and V are one product, gate and up another."""

    def __init__(self, g: Geometry, dtype: jnp.dtype):
        q_size, kv_size = g.heads * g.head_dim, g.kv_heads * g.head_dim
        self.geometry = g
        self.input_norm = RMSNorm(g.hidden, g.norm_eps, dtype)
        self.qkv = Linear(g.hidden, q_size + 2 * kv_size, dtype, bias=g.qkv_bias)
        self.q_norm = RMSNorm(g.head_dim, g.norm_eps, dtype) if g.qk_norm else None
        self.k_norm = RMSNorm(g.head_dim, g.norm_eps, dtype) if g.qk_norm else None
        self.o = Linear(q_size, g.hidden, dtype, bias=g.o_bias)
        self.post_norm = RMSNorm(g.hidden, g.norm_eps, dtype)
        self.gate_up = Linear(g.hidden, 2 * g.intermediate, dtype, bias=g.mlp_bias)
        self.down = Linear(g.intermediate, g.hidden, dtype, bias=g.mlp_bias)

    def project(
        self, x: Float[Array, "N H"], positions: Int[Array, " N"], spans: Int[Array, " N"]
    ) -> tuple[Float[Array, "N Hkv R D"], Float[Array, "N Hkv D"], Float[Array, "N Hkv D"]]:
        """Rotated queries, rotated keys, values. `spans`: the row's tokens so far, for dynamic RoPE."""
        g = self.geometry
        q_size, kv_size = g.heads * g.head_dim, g.kv_heads * g.head_dim
        qkv = self.qkv(self.input_norm(x))
        q = qkv[:, :q_size].reshape(-1, g.heads, g.head_dim)
        k = qkv[:, q_size : q_size + kv_size].reshape(-1, g.kv_heads, g.head_dim)
        v = qkv[:, q_size + kv_size :].reshape(-1, g.kv_heads, g.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = _rotation(g, positions, spans, x.dtype)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        return q.reshape(-1, g.kv_heads, g.query_per_kv, g.head_dim), k, v

    def queries(
        self,
        weights: Float[Array, "H columns"],
        x: Float[Array, "N H"],
        positions: Int[Array, " N"],
        spans: Int[Array, " N"],
    ) -> Float[Array, "N Hkv R D"]:
        """`project`'s queries alone, by `weights` of any dtype: see `query_weights`."""
        g = self.geometry
        normed = self.input_norm(x).astype(weights.dtype)
        q = jnp.einsum("nh,hq->nq", normed, weights, preferred_element_type=jnp.float32).astype(x.dtype)
        q = q[:, : g.heads * g.head_dim]
        if self.qkv.bias is not None:
            q = q + self.qkv.bias[: q.shape[1]]
        q = q.reshape(-1, g.heads, g.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        return _rotate(q, *_rotation(g, positions, spans, x.dtype)).reshape(
            -1, g.kv_heads, g.query_per_kv, g.head_dim
        )

    def finish(self, x: Float[Array, "N H"], attended: Float[Array, "N Hkv R D"]) -> Float[Array, "N H"]:
        """Adds the attention output's projection and the gated MLP to the residual stream."""
        x = x + self.o(attended.reshape(x.shape[0], -1))
        gate, up = jnp.split(self.gate_up(self.post_norm(x)), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up)


def _rotation(
    g: Geometry, positions: Int[Array, " N"], spans: Int[Array, " N"], dtype: jnp.dtype
) -> tuple[Float[Array, "N 1 D"], Float[Array, "N 1 D"]]:
    """cos and sin of each token's rotation, in float32 until the end."""
    if g.rope_scaling is not None and g.rope_scaling.kind == "dynamic":
        # The base follows each row's own length; keys in the cache keep the rotation they were given.
        frequencies = frequencies_of_base(dynamic_base(spans, g, jnp), g.head_dim, jnp)  # [N, D/2]
    else:
        frequencies = jnp.asarray(inv_freq(g))[None]  # [1, D/2]
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    angles = jnp.concatenate([angles, angles], axis=-1)[:, None]  # [N, 1, D]
    scale = attention_scaling(g)
    return (jnp.cos(angles) * scale).astype(dtype), (jnp.sin(angles) * scale).astype(dtype)


def _rotate(
    x: Float[Array, "N heads D"], cos: Float[Array, "N 1 D"], sin: Float[Array, "N 1 D"]
) -> Float[Array, "N heads D"]:
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def _rotate_to(
    g: Geometry, k: Float[Array, "N Hkv D"], positions: Int[Array, " N"], spans: Int[Array, " N"]
) -> Float[Array, "N Hkv D"]:
    return _rotate(k, *_rotation(g, positions, spans, k.dtype))


def _unrotate_from(
    g: Geometry, k: Float[Array, "N Hkv D"], positions: Int[Array, " N"], spans: Int[Array, " N"]
) -> Float[Array, "N Hkv D"]:
    cos, sin = _rotation(g, positions, spans, k.dtype)
    return _rotate(k, cos, -sin) / attention_scaling(g) ** 2


@dataclass(frozen=True)
class BlockFunctions:
    """The block's two halves, and its queries alone, as functions of one layer's parameters, and their shape.

    `rotate` puts positions into keys, `unrotate` takes them out again: (keys [N, Hkv, D], positions [N], spans [N]) →
    keys; see `DecoderBlock.project`.
    """

    params: Params  # pytree of jax.ShapeDtypeStruct
    project: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    finish: Callable[..., jax.Array]
    queries: Callable[..., jax.Array]
    rotate: Callable[..., jax.Array]
    unrotate: Callable[..., jax.Array]


def split_block(geometry: Geometry, dtype: str) -> BlockFunctions:
    """Splits the block's module once; every layer of the model runs through the functions returned."""
    abstract = nnx.eval_shape(lambda: DecoderBlock(geometry, jnp.dtype(dtype)))
    graph, state = nnx.split(abstract)
    treedef = jax.tree.structure(state)

    def module(params: Params) -> DecoderBlock:
        return nnx.merge(graph, jax.tree.unflatten(treedef, jax.tree.leaves(params)))

    return BlockFunctions(
        params=nnx.to_pure_dict(state),
        project=lambda params, *args: module(params).project(*args),
        finish=lambda params, *args: module(params).finish(*args),
        queries=lambda params, *args: module(params).queries(*args),
        rotate=partial(_rotate_to, geometry),
        unrotate=partial(_unrotate_from, geometry),
    )


def query_weights(params: Params, geometry: Geometry, columns: int) -> Float[Array, "H columns"]:
    """The part of a layer's fused weights that makes queries, and zeros up to `columns`. A copy: a product needs them
    contiguous."""
    size = geometry.heads * geometry.head_dim
    return jnp.pad(params["qkv"]["kernel"][:size].T, ((0, 0), (0, columns - size)))
