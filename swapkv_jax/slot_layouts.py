"""How the slots of policy `group` lie on the device, and what is done with them where they lie.

Shapes: B rows, Hkv KV heads, R query heads per KV head, D head dim, C1 reuse slots and one that padding may
overwrite, G tokens per group, W values of a packed token, n records of a load. A pool or a rolling buffer is a tuple
of arrays, those of `plan.pool_parts` and `plan.rolling_parts`.
"""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from swapkv_jax.attention_choice import slot_width
from swapkv_jax.plan import Plan

Parts = tuple[jax.Array, ...]
WIDENED_BYTES = 9 << 19


class SlotLayout(abc.ABC):
    """One layer's slots and its rolling buffer; every layer's are alike."""

    def __init__(self, plan: Plan):
        assert plan.selection is not None
        self._selection = plan.selection
        self._heads, self._dim, self.tokens = plan.kv_heads, plan.head_dim, plan.group_tokens

    def load(
        self, pool: Parts, records: Float[Array, "n values"], rows: Int[Array, " n"], slots: Int[Array, " n"]
    ) -> tuple[Parts, jax.Array]:
        """Puts records, each K [Hkv, D, G] then V [Hkv, G, D], into slots of rows. Padding goes to the last slot.

        Returns: the pool, and the staging memory's fence, which is ready when the records have been read.
        """

        records = seen_as(records, pool[0].dtype)

        def one_by_one(pool: Parts, records: jax.Array) -> Parts:
            def put(i: Int[Array, ""], pool: Parts) -> Parts:
                return self._put_one(pool, records[i], rows[i], slots[i])

            return jax.lax.fori_loop(0, records.shape[0], put, pool)

        def at_once(pool: Parts, records: jax.Array) -> Parts:
            # A GPU's command buffer takes no loop.
            return self._put_all(pool, records, rows, slots)

        pool = jax.lax.platform_dependent(pool, records, cuda=at_once, rocm=at_once, default=one_by_one)
        return pool, rows[0] + slots[0]

    def record_parts(self, records: Float[Array, "*n values"]) -> tuple[jax.Array, jax.Array]:
        """K [*n, Hkv, D, G] and V [*n, Hkv, G, D] of records."""
        size, batch = self._heads * self._dim * self.tokens, records.shape[:-1]
        k = records[..., :size].reshape(*batch, self._heads, self._dim, self.tokens)
        return k, records[..., size : 2 * size].reshape(*batch, self._heads, self.tokens, self._dim)

    def append(
        self,
        rolling: Parts,
        k: Float[Array, "B Hkv D"],
        v: Float[Array, "B Hkv D"],
        newest: Int[Array, " B"],
    ) -> Parts:
        """The rolling buffer with each row's new token at its index `newest`."""
        here = (jnp.arange(self.tokens) == newest[:, None])[:, None, :, None]  # [B, 1, G, 1]
        new = self._joined(k, v)
        return tuple(
            jnp.where(here, part[:, :, None].astype(old.dtype), old)
            for part, old in zip(new, rolling, strict=True)
        )

    @abc.abstractmethod
    def attend(
        self,
        q: Float[Array, "B Hkv R D"],
        pool: Parts,
        used: Bool[Array, "B C1"],
        rolling: Parts,
        newest: Int[Array, " B"],
    ) -> Float[Array, "B Hkv R D"]:
        """Each row's query over the slots in use and over the rolling buffer's tokens 0 … `newest`."""

    @abc.abstractmethod
    def keys(self, rolling: Parts) -> Float[Array, "B Hkv G D"]:
        """The rolling buffer's keys."""

    @abc.abstractmethod
    def pack(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        """On the host: a rolling buffer of K and V [B, Hkv, G, D]."""

    @abc.abstractmethod
    def unpack(self, rolling: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        """On the host: K and V [B, Hkv, G, D] of a rolling buffer, as views of it."""

    @abc.abstractmethod
    def _joined(self, k: jax.Array, v: jax.Array) -> Parts:
        """K and V [.., D] as they lie."""

    @abc.abstractmethod
    def _put_one(self, pool: Parts, record: jax.Array, row: jax.Array, slot: jax.Array) -> Parts: ...

    @abc.abstractmethod
    def _put_all(self, pool: Parts, records: jax.Array, rows: jax.Array, slots: jax.Array) -> Parts: ...


class ApartSlots(SlotLayout):
    """K [B, Hkv, D, C1·G] and V [B, Hkv, C1·G, D]: attended where they lie, slots not in use masked out. A CPU
    multiplies a transposed K fastest, and nothing is copied."""

    def attend(
        self,
        q: Float[Array, "B Hkv R D"],
        pool: Parts,
        used: Bool[Array, "B C1"],
        rolling: Parts,
        newest: Int[Array, " B"],
    ) -> Float[Array, "B Hkv R D"]:
        """The two parts join by merging softmax sums (online softmax), so nothing is concatenated or copied. Slots
        not in use take no part: any K there, even NaN, and any finite V; of int8 any step."""
        if pool[0].dtype == rolling[0].dtype:
            return self._attend(q, pool, used, rolling, newest)
        # A CPU has to widen slots of fewer bits before it multiplies. A few rows' heads at a time they stay in its
        # caches (all of them at once took 1.6 times as long).
        units, unit_bytes = q.shape[0] * q.shape[1], 2 * pool[0][0, 0].size * q.dtype.itemsize
        most = min(units, max(1, WIDENED_BYTES // unit_bytes))
        at_once = next(n for n in range(most, 0, -1) if units % n == 0)

        # No dimension of 1: XLA would lay int8 slots out in another order, and copy them all.
        some = (at_once,) if at_once > 1 else ()

        def by_head(x: jax.Array) -> jax.Array:
            return x.reshape(-1, *some, *x.shape[2:])

        def by_row(x: jax.Array) -> jax.Array:
            return jnp.repeat(x, q.shape[1], axis=0).reshape(-1, *some, *x.shape[1:])

        def attend_some(parts: Any) -> jax.Array:
            heads, rows = parts
            q, pool, rolling = jax.tree.map(lambda x: x.reshape(at_once, 1, *x.shape[len(some) :]), heads)
            used, newest = jax.tree.map(lambda x: x.reshape(at_once, *x.shape[len(some) :]), rows)
            return self._attend(q, pool, used, rolling, newest)

        parts = jax.tree.map(by_head, (q, pool, rolling)), jax.tree.map(by_row, (used, newest))
        return jax.lax.map(attend_some, parts).reshape(q.shape)

    def _attend(
        self, q: jax.Array, pool: Parts, used: jax.Array, rolling: Parts, newest: jax.Array
    ) -> jax.Array:
        pool_k, pool_v = (self._numbers(part, rolling[0].dtype).astype(q.dtype) for part in pool[:2])
        rolling_k, rolling_v = (part.astype(q.dtype) for part in rolling)
        k_steps, v_steps = self._steps(pool, used)
        scale = q.shape[-1] ** -0.5
        far = jnp.einsum("bkrd,bkds->bkrs", q, pool_k, preferred_element_type=jnp.float32) * scale
        near = jnp.einsum("bkrd,bkgd->bkrg", q, rolling_k, preferred_element_type=jnp.float32) * scale
        far = jnp.where(used[:, None, None, :, None], self._by_slot(far) * k_steps, -jnp.inf)
        near = jnp.where((jnp.arange(self.tokens) <= newest[:, None])[:, None, None], near, -jnp.inf)
        far = far.reshape(*far.shape[:3], -1)
        # Finite: the new token is always near.
        top = jnp.maximum(far.max(axis=-1), near.max(axis=-1))[..., None]
        far, near = jnp.exp(far - top), jnp.exp(near - top)
        weights = (self._by_slot(far) * v_steps).reshape(far.shape).astype(q.dtype)
        out = jnp.einsum("bkrs,bksd->bkrd", weights, pool_v, preferred_element_type=jnp.float32)
        out = out + jnp.einsum(
            "bkrg,bkgd->bkrd", near.astype(q.dtype), rolling_v, preferred_element_type=jnp.float32
        )
        return (out / (far.sum(axis=-1) + near.sum(axis=-1))[..., None]).astype(q.dtype)

    def _numbers(self, part: jax.Array, dtype: Any) -> jax.Array:
        """K or V of slots as numbers; `dtype` is what they are if they are held as bits."""
        return seen_as(part, dtype)

    def _steps(self, pool: Parts, used: Bool[Array, "B C1"]) -> tuple[Any, Any]:
        """What K and V of each slot are multiples of, [B, Hkv, 1, C1, 1], or one number for all."""
        return 1.0, 1.0

    def _by_slot(self, x: Float[Array, "B Hkv R n"]) -> Float[Array, "B Hkv R C1 G"]:
        """A CPU's XLA goes over slots and their tokens fast; to find a token's slot it would divide."""
        return x.reshape(*x.shape[:3], -1, self.tokens)

    def keys(self, rolling: Parts) -> Float[Array, "B Hkv G D"]:
        return rolling[0]

    def pack(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        return np.ascontiguousarray(k), v

    def unpack(self, rolling: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        k, v = rolling
        return k, v

    def _joined(self, k: jax.Array, v: jax.Array) -> Parts:
        return k, v

    def _put_one(self, pool: Parts, record: jax.Array, row: jax.Array, slot: jax.Array) -> Parts:
        zero, at = jnp.zeros((), jnp.int32), slot * self.tokens
        k, v = (part[None] for part in self.record_parts(record))
        return (
            jax.lax.dynamic_update_slice(pool[0], k, (row, zero, zero, at)),
            jax.lax.dynamic_update_slice(pool[1], v, (row, zero, at, zero)),
        )

    def _put_all(self, pool: Parts, records: jax.Array, rows: jax.Array, slots: jax.Array) -> Parts:
        at = slots[:, None] * self.tokens + jnp.arange(self.tokens, dtype=jnp.int32)  # [n, G]
        k, v = self.record_parts(records)
        k, v = k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)  # [n, G, Hkv, D]
        return (
            pool[0].at[rows[:, None], :, :, at].set(k, mode="promise_in_bounds"),
            pool[1].at[rows[:, None], :, at].set(v, mode="promise_in_bounds"),
        )


class Int8Slots(ApartSlots):
    """As `ApartSlots`, of whole numbers in int8; a third array, [B, Hkv, 2, C1], has the steps that K and V of each
    slot are multiples of. A record ends in its steps, float32 [Hkv, 2].

    (Queries and weights as two digits of int8 each, so that bytes are multiplied, gained nothing: their making took
    what the products saved.)
    """

    def _numbers(self, part: jax.Array, dtype: Any) -> jax.Array:
        return part

    def _steps(self, pool: Parts, used: Bool[Array, "B C1"]) -> tuple[Any, Any]:
        steps = jnp.where(used[:, None, None], pool[2], 0)  # of slots not in use they may be anything
        return steps[:, :, 0][:, :, None, :, None], steps[:, :, 1][:, :, None, :, None]

    def _put_one(self, pool: Parts, record: jax.Array, row: jax.Array, slot: jax.Array) -> Parts:
        zero = jnp.zeros((), jnp.int32)
        steps = self._record_steps(record)[None, ..., None]
        return (
            *super()._put_one(pool[:2], record, row, slot),
            jax.lax.dynamic_update_slice(pool[2], steps, (row, zero, zero, slot)),
        )

    def _put_all(self, pool: Parts, records: jax.Array, rows: jax.Array, slots: jax.Array) -> Parts:
        steps = self._record_steps(records)
        return (
            *super()._put_all(pool[:2], records, rows, slots),
            pool[2].at[rows, :, :, slots].set(steps, mode="promise_in_bounds"),
        )

    def _record_steps(self, records: jax.Array) -> jax.Array:
        """The steps [*n, Hkv, 2] of records [*n, stride]."""
        first, count = 2 * self._heads * self._dim * self.tokens, 2 * self._heads
        own = records[..., first : first + 4 * count].reshape(*records.shape[:-1], self._heads, 2, 4)
        return jax.lax.bitcast_convert_type(own, jnp.float32)


class PackedSlots(SlotLayout):
    """One pool [B, Hkv, C1, G, W]: a token's K and V side by side, then zeros where W is more. A kernel reads the
    slots that are attended and no others."""

    def __init__(self, plan: Plan, interpret: Any = False, *, whole: bool = False):
        super().__init__(plan)
        choice = self._selection
        # Else the kernel is given no more than the selected slots.
        self._every = whole or choice.attended == "kept" or choice.selected_groups == choice.reuse_slots
        self._backend, self._interpret = plan.attention, interpret
        self._width = slot_width(plan.attention, plan.head_dim)

    def attend(
        self,
        q: Float[Array, "B Hkv R D"],
        pool: Parts,
        used: Bool[Array, "B C1"],
        rolling: Parts,
        newest: Int[Array, " B"],
    ) -> Float[Array, "B Hkv R D"]:
        # Imported here: the kernels' compilers take 0.3 s, which decoding without them need not wait for.
        from swapkv_jax.kernels.gather_attention import gather_attention  # pyright: ignore[reportMissingImports]

        slots, valid = self._slots(used)
        kv = seen_as(pool[0], rolling[0].dtype)
        out, _ = gather_attention(
            q.astype(kv.dtype),
            kv,
            slots,
            valid,
            *rolling,
            newest,
            backend=self._backend,
            interpret=self._interpret,
        )
        return out.astype(q.dtype)

    def _slots(self, used: Bool[Array, "B C1"]) -> tuple[Int[Array, "B n"], Bool[Array, "B n"]]:
        """The kernel's form of the slots in use: as many entries as there can be, and which of them count."""
        used = used[:, :-1]  # the last slot is never in use
        if self._every:
            return jnp.broadcast_to(jnp.arange(used.shape[1], dtype=jnp.int32), used.shape), used
        valid, slots = jax.lax.top_k(used.astype(jnp.float32), self._selection.selected_groups)
        return slots, valid > 0

    def keys(self, rolling: Parts) -> Float[Array, "B Hkv G D"]:
        return rolling[0][..., : self._dim]

    def pack(self, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
        rolling = np.zeros((*v.shape[:-1], self._width), v.dtype)
        rolling[..., : self._dim], rolling[..., self._dim : 2 * self._dim] = k, v
        return (rolling,)

    def unpack(self, rolling: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        return rolling[0][..., : self._dim], rolling[0][..., self._dim : 2 * self._dim]

    def _joined(self, k: jax.Array, v: jax.Array) -> Parts:
        fill = jnp.zeros((*v.shape[:-1], self._width - 2 * self._dim), v.dtype)
        return (jnp.concatenate([k, v, fill], axis=-1),)

    def _put_one(self, pool: Parts, record: jax.Array, row: jax.Array, slot: jax.Array) -> Parts:
        zero = jnp.zeros((), jnp.int32)
        k, v = self.record_parts(record)
        (group,) = self._joined(k.swapaxes(-1, -2), v)  # [Hkv, G, W]
        return (jax.lax.dynamic_update_slice(pool[0], group[None, :, None], (row, zero, slot, zero, zero)),)

    def _put_all(self, pool: Parts, records: jax.Array, rows: jax.Array, slots: jax.Array) -> Parts:
        k, v = self.record_parts(records)
        (groups,) = self._joined(k.swapaxes(-1, -2), v)  # [n, Hkv, G, W]
        return (pool[0].at[rows, :, slots].set(groups, mode="promise_in_bounds"),)


def seen_as(values: jax.Array, dtype: Any) -> jax.Array:
    """The same bits as another dtype of as many; see `Plan.held_dtype`."""
    return values if values.dtype == dtype else jax.lax.bitcast_convert_type(values, dtype)


def slot_layout(plan: Plan, interpret: Any = False, *, whole: bool = False) -> SlotLayout:
    """The layout that the plan's attention reads.

    Args:
      whole: of a layer that keeps every group, and attends them all.
      interpret: interprets the plan's kernel, for tests off its platform; see `gather_attention`.
    """
    if plan.attention == "xla":
        return Int8Slots(plan) if plan.cache_dtype == "int8" else ApartSlots(plan)
    return PackedSlots(plan, interpret, whole=whole)
