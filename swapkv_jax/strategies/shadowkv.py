"""Low-rank keys instead of keys on disk (ShadowKV, arXiv 2410.21465).

After a prompt its keys before RoPE, of all KV heads side by side, are factorised by a singular value decomposition
of that prompt alone: [S, Hkv·D] ≈ [S, r] · [r, Hkv·D]. The factors stay in memory and keys are made of them when
they are attended; on disk there are values alone, so that a group (ShadowKV's chunk, of 8 tokens) is half of what
others read. Groups are scored by their landmarks, the means of their post-RoPE keys: per query head a softmax over
groups, added up. Groups whose landmark resembles their keys least (cosine similarity of the worst token) are
outliers: they are always selected and keep exact keys, as do the last `recent_groups` of the prompt.

Parameters: `rank` (160 of 1,024 in the paper), `group_tokens` (8), `outlier_groups` (48 of 4,096 or more). Landmarks
and factors are of the plan's summary dtype, as everyone's summary is: bfloat16 unless it is chosen, the paper's.

Adapted to a disk as KVSwap adapts its peers: values come from disk; the KV heads of a row share what is read
(ShadowKV selects for each apart, and takes the largest of its query heads' softmaxes); the selection is made one
layer or one token ahead. A group that is completed in decode has exact keys while a slot holds it, as it does from
the next step on; read again later its keys are projected onto the prompt's factors. (ShadowKV keeps all generated
keys, of at most 128 tokens.) What slots hold has whole keys and is not made anew in every step.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from swapkv_jax.models.blocks import BlockFunctions
from swapkv_jax.plan import Plan
from swapkv_jax.predictor import group_means, head_scores
from swapkv_jax.selection import Aggregate, Selection
from swapkv_jax.strategies.sizes import RING, exact_groups
from swapkv_jax.strategies.writes import write, write_places

Summary = dict[str, jax.Array]
_ALWAYS = 1e30  # a score above all others, and finite: pinned groups come first


class ShadowKV:
    """Its summary: landmarks [B, N, Hkv·D]; coordinates [B, S, r] and basis [B, Hkv·D, r], the factors of the keys;
    exact keys [B, E, Hkv, D, G] of the groups in exact_ids [B, E], -1 for none. The last of those are the newest two
    groups of decode."""

    def __init__(self, plan: Plan, choice: Selection, block: BlockFunctions):
        self._tokens, self._block = plan.group_tokens, block
        self._aggregate: Aggregate = choice.aggregate
        self._rank, self._pinned, self._recent = choice.rank, exact_groups(choice), choice.recent_groups

    def fill(
        self,
        summary: Summary,
        adapter: Any,
        k: Float[Array, "1 Hkv D S"],
        row: Int[Array, ""],
        length: Int[Array, ""],
    ) -> Summary:
        """The summary with a prefilled row of `length` tokens in it."""
        del adapter
        _, heads, dim, size = k.shape
        at = jnp.arange(size, dtype=jnp.int32)
        k = jnp.where(at < length, k, 0)
        before = self._block.unrotate(k[0].transpose(2, 0, 1).astype(jnp.float32), at, at + 1).reshape(
            size, -1
        )
        _, vectors = jnp.linalg.eigh(before.T @ before)  # right singular vectors
        basis = vectors[:, ::-1][:, : self._rank]
        landmarks = group_means(k, self._tokens)  # [1, Hkv, D, N]
        ids = self._exact_ids(k[0], landmarks[0], length)
        grouped = k.reshape(heads, dim, -1, self._tokens)
        exact = jnp.take(grouped, ids, axis=2, mode="clip").transpose(2, 0, 1, 3)  # [E, Hkv, D, G]
        new = {
            "landmarks": landmarks.transpose(0, 3, 1, 2).reshape(1, -1, heads * dim),
            "coordinates": (before @ basis)[None],
            "basis": basis[None],
            "exact": exact[None],
            "exact_ids": ids[None],
        }
        zero = jnp.zeros((), jnp.int32)
        return {
            name: write(summary[name], part, (row, *[zero] * (part.ndim - 1))) for name, part in new.items()
        }

    def _exact_ids(
        self, k: Float[Array, "Hkv D S"], landmarks: Float[Array, "Hkv D N"], length: Int[Array, ""]
    ) -> Int[Array, " E"]:
        """The prompt's last groups and its outliers, then room for the newest of decode."""
        keys = k.reshape(*k.shape[:2], -1, self._tokens).astype(jnp.float32)  # [Hkv, D, N, G]
        dots = jnp.einsum("kdng,kdn->kng", keys, landmarks)
        norms = jnp.linalg.norm(keys, axis=1) * jnp.linalg.norm(landmarks, axis=1)[..., None]
        similarity = (dots / jnp.maximum(norms, 1e-20)).min(axis=-1).mean(axis=0)  # [N]
        groups = jnp.arange(similarity.shape[0], dtype=jnp.int32)
        complete = length // self._tokens
        similarity = jnp.where(groups >= complete - self._recent, -jnp.inf, similarity)
        similarity = jnp.where(groups < complete, similarity, jnp.inf)
        count = min(self._pinned, similarity.shape[0])
        _, ids = jax.lax.top_k(-similarity, count)
        ids = jnp.where(ids < complete, ids, -1)
        return jnp.pad(ids, (0, self._pinned - count + RING), constant_values=-1)

    def advance(
        self,
        summary: Summary,
        adapter: Any,
        newest: Float[Array, "B Hkv D"],
        group: Float[Array, "B Hkv G D"] | None,
        lengths: Int[Array, " B"],
    ) -> Summary:
        del adapter
        keys = newest[:, :, None] if group is None else group
        before = self._block.unrotate(newest.astype(jnp.float32), lengths, lengths + 1)
        coordinates = jnp.einsum(
            "bn,bnr->br", before.reshape(len(before), -1), summary["basis"].astype(jnp.float32)
        )
        mean = keys.astype(jnp.float32).mean(axis=2)
        number = lengths // self._tokens
        ring = self._pinned + number % RING
        places = {
            "landmarks": (mean.reshape(len(mean), 1, -1), number),
            "coordinates": (coordinates[:, None], lengths),
            "exact": (keys.swapaxes(2, 3)[:, None], ring),
            "exact_ids": (number[:, None], ring),
        }
        return summary | {
            name: write_places(summary[name], place, at, 1) for name, (place, at) in places.items()
        }

    def score(
        self, q: Float[Array, "B Hkv R D"], adapter: Any, summary: Summary, lengths: Int[Array, " B"]
    ) -> Float[Array, "B N"]:
        del adapter
        complete, scale = lengths // self._tokens, q.shape[-1] ** -0.5
        scores = head_scores(
            q.astype(jnp.float32), summary["landmarks"], complete, 1, self._aggregate, scale=scale
        )
        groups = jnp.arange(scores.shape[1])
        exact = (summary["exact_ids"][:, : self._pinned, None] == groups).any(axis=1)
        return jnp.where(exact & (groups < complete[:, None]), _ALWAYS, scores)

    def keys(
        self, summary: Summary, rows: Int[Array, " n"], groups: Int[Array, " n"]
    ) -> Float[Array, "n Hkv D G"]:
        """Post-RoPE keys of groups of rows: the exact ones where they are kept, else made of their factors."""
        _, _, heads, dim, tokens = summary["exact"].shape
        at = groups[:, None] * tokens + jnp.arange(tokens, dtype=jnp.int32)  # [n, G]
        coordinates = summary["coordinates"][rows[:, None], at].astype(jnp.float32)
        basis = summary["basis"][rows].astype(jnp.float32)
        before = jnp.einsum("ngr,nkr->ngk", coordinates, basis).reshape(-1, heads, dim)
        at = at.reshape(-1)
        made = self._block.rotate(before, at, at + 1).reshape(-1, tokens, heads, dim).transpose(0, 2, 3, 1)
        same = summary["exact_ids"][rows] == groups[:, None]  # [n, E]
        exact = summary["exact"][rows, same.argmax(axis=1)]
        return jnp.where(same.any(axis=1)[:, None, None, None], exact, made.astype(exact.dtype))

    def whole_records(
        self,
        records: Float[Array, "n values"],
        rows: Int[Array, " n"],
        groups: Int[Array, " n"],
        summary: Summary,
    ) -> Float[Array, "n more"]:
        """Records of values with their keys before them."""
        keys = self.keys(summary, rows, groups)
        keys = keys.reshape(keys.shape[0], -1)
        return jnp.concatenate([keys.astype(records.dtype), records[:, : keys.shape[1]]], axis=1)
