"""The attention kernels of the device at hand: against a float64 reference, and against its memory's bandwidth.

No accelerator was there when the kernels were written. What is known without one: they compile for the devices of
`portability_targets`, and interpreted they compute what the reference does. The interpreter knows neither layouts of
registers and shared memory nor what `wgmma` makes of them, for which it takes a plain product: what `mosaic_hopper`
gives on a GPU, and how fast any of them is, this check is the first to say.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from accelerator_findings import Finding, raised
from swapkv_jax.kernels.gather_attention import (  # pyright: ignore[reportMissingImports]
    Backend,
    gather_attention,
)
from swapkv_jax.kernels.versions import (  # pyright: ignore[reportMissingImports]
    gpu_interpreter,
    tpu_interpreter,
)

from swapkv_jax import PlanError
from swapkv_jax.attention_choice import Attention, check_capability, refusal, slot_width
from swapkv_jax.staging import compute_capability

PART = "kernel"
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}  # of the largest value
_CHAINED, _TRIES = 10, 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of a call: B rows, Hkv KV heads, R queries each, head dim D, C slots of G tokens, M of them selected."""

    batch: int
    kv_heads: int
    repeat: int
    head_dim: int
    slots: int
    group: int
    selected: int
    dtype: str

    def __str__(self) -> str:
        return (
            f"{self.dtype} B{self.batch} Hkv{self.kv_heads} R{self.repeat} D{self.head_dim} G{self.group} "
            f"M{self.selected} of {self.slots}"
        )

    def bytes(self, width: int) -> int:
        """What a call reads of the pool, the only large operand."""
        itemsize = 4 if self.dtype == "float32" else 2
        return self.batch * self.kv_heads * self.selected * self.group * width * itemsize


def _case(
    batch: int, kv_heads: int, repeat: int, head_dim: int, group: int, selected: int, dtype: str
) -> Case:
    return Case(
        batch=batch,
        kv_heads=kv_heads,
        repeat=repeat,
        head_dim=head_dim,
        slots=selected + 7,
        group=group,
        selected=selected,
        dtype=dtype,
    )


CASES = tuple(
    _case(*sizes, dtype)
    for dtype in ("float32", "bfloat16")
    for sizes in (
        (2, 3, 3, 64, 4, 96),
        (3, 8, 4, 128, 4, 61),
        (3, 8, 4, 128, 8, 61),
        (2, 1, 16, 256, 8, 5),
        (1, 16, 1, 128, 16, 33),
    )
)
TIMED = tuple(  # the same tokens in groups of 4 and of 8
    _case(8, 8, 4, 128, group, tokens // group, "bfloat16") for tokens in (384, 6144) for group in (4, 8)
)
TINY = (_case(2, 2, 3, 64, 4, 5, "float32"),)
TINY_FOR_ALL = (*TINY, _case(2, 2, 3, 64, 8, 5, "bfloat16"))  # of which each kernel serves one at least


def backends(interpreted: bool) -> tuple[tuple[Attention, Any], ...]:
    """What the device at hand can run, with the interpreter for what it can only interpret (if asked for)."""
    platform = jax.default_backend()
    if platform == "tpu":
        return ("xla", False), ("mosaic_tpu", False)
    if platform == "gpu":
        gpu: tuple[Attention, ...] = ("xla", "mosaic_gpu", "mosaic_hopper")
        return tuple((backend, False) for backend in gpu if _runs(backend, compute_capability()))
    if not interpreted:
        return (("xla", False),)
    return (
        ("xla", False),
        ("mosaic_tpu", tpu_interpreter(detect_races=False)),
        ("mosaic_gpu", gpu_interpreter(detect_races=False)),
        ("mosaic_hopper", gpu_interpreter(detect_races=False)),
    )


def _runs(backend: Attention, capability: float | None) -> bool:
    """Whether a GPU of that compute capability has a kernel; one of none (it is not CUDA's) has no kernels."""
    if capability is None:
        return backend == "xla"
    try:
        check_capability(backend, capability)
    except PlanError:
        return False
    return True


def _served(backend: Attention, cases: Sequence[Case]) -> list[Case]:
    return [
        case
        for case in cases
        if refusal(
            backend,
            kv_heads=case.kv_heads,
            heads=case.kv_heads * case.repeat,
            head_dim=case.head_dim,
            group_tokens=case.group,
            dtype=case.dtype,
        )
        is None
    ]


def check_kernels(cases: Sequence[Case], *, interpreted: bool = False) -> Iterator[Finding]:
    """Each backend that runs here, on the cases that it serves, against float64; whatever it must not read is NaN."""
    for backend, interpret in backends(interpreted):
        worst: dict[str, float] = {}
        served = _served(backend, cases)
        for seed, case in enumerate(served):
            operands = _operands(case, slot_width(backend, case.head_dim), seed)
            try:
                with jax.default_matmul_precision("highest"):
                    out, lse = gather_attention(*operands, backend=backend, interpret=interpret)
            except Exception as error:
                yield raised(PART, f"{backend} {case}", error)
                continue
            expected, expected_lse = _reference(case, *operands)
            error = max(_error(out, expected), _error(lse, expected_lse))
            worst[case.dtype] = max(worst.get(case.dtype, 0.0), error)
        for dtype, error in worst.items():
            number = sum(case.dtype == dtype for case in served)
            yield Finding(
                part=PART,
                what=f"{backend} {dtype}, {number} cases",
                found=f"relative error {error:.1e} (at most {TOLERANCE[dtype]:.0e})",
                passed=error <= TOLERANCE[dtype],
                values={"error": error},
            )


def time_kernels(cases: Sequence[Case], bandwidth: float) -> Iterator[Finding]:
    """Seconds per call of each backend, beside what its reads take at the measured bandwidth of the memory."""
    for case in cases:
        for backend, _ in backends(interpreted=False):
            if not _served(backend, [case]):
                continue
            width = slot_width(backend, case.head_dim)
            try:
                seconds = _seconds(_operands(case, width, 0, poisoned=False), backend)
            except Exception as error:
                yield raised(PART, f"{backend} {case}", error)
                continue
            floor = case.bytes(width) / bandwidth
            yield Finding(
                part=PART,
                what=f"{backend} {case}",
                found=f"{1e6 * seconds:.1f} us, its reads at memory bandwidth {1e6 * floor:.1f} us",
                passed=None,
                values={"seconds": seconds, "floor_s": floor},
            )


def _operands(case: Case, width: int, seed: int, *, poisoned: bool = True) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    dtype = np.float32 if case.dtype == "float32" else ml_dtypes.bfloat16
    b, h, d = case.batch, case.kv_heads, case.head_dim

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    pool, rolling = draw(b, h, case.slots, case.group, width), draw(b, h, case.group, width)
    slots = np.stack([rng.permutation(case.slots)[: case.selected] for _ in range(b)]).astype(np.int32)
    valid = rng.random((b, case.selected)) < 0.9
    newest = rng.integers(0, case.group, b, dtype=np.int32)
    for row in range(b if poisoned else 0):
        unread = np.setdiff1d(np.arange(case.slots), slots[row][valid[row]])
        pool[row, :, unread] = np.nan
        rolling[row, :, newest[row] + 1 :] = np.nan
    return [draw(b, h, case.repeat, d), pool, slots, valid, rolling, newest]


def _reference(
    case: Case,
    q: np.ndarray,
    pool: np.ndarray,
    slots: np.ndarray,
    valid: np.ndarray,
    rolling: np.ndarray,
    newest: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Attended values [B, Hkv, R, D] and log-sum-exp [B, Hkv, R] in float64."""
    d = case.head_dim
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:3])
    for row, head in np.ndindex(*q.shape[:2]):
        kept = pool[row, head, slots[row][valid[row]]].reshape(-1, pool.shape[-1])
        kv = np.concatenate([kept, rolling[row, head, : newest[row] + 1]]).astype(np.float64)
        scores = q[row, head].astype(np.float64) @ kv[:, :d].T * d**-0.5
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        lse[row, head] = np.log(weights.sum(axis=1)) + top[:, 0]
        out[row, head] = weights @ kv[:, d : 2 * d] / weights.sum(axis=1, keepdims=True)
    return out, lse


def _error(found: jax.Array, expected: np.ndarray) -> float:
    """The largest difference, as a part of the largest value; infinite where anything is NaN."""
    difference = np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max()
    return float(difference) if np.isfinite(difference) else float("inf")


def _seconds(operands: Sequence[np.ndarray], backend: Backend) -> float:
    """Of one call among several of a graph, each of which takes its queries from the one before."""

    @jax.jit
    def chained(q: jax.Array, *rest: jax.Array) -> jax.Array:
        for _ in range(_CHAINED):
            q, _ = gather_attention(q, *rest, backend=backend)
        return q

    placed = [jax.device_put(operand) for operand in operands]
    chained(*placed).block_until_ready()
    best = float("inf")
    for _ in range(_TRIES):
        started = time.perf_counter()
        chained(*placed).block_until_ready()
        best = min(best, time.perf_counter() - started)
    return best / _CHAINED
