"""Gather attention: every backend against float64 NumPy, with NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from swapkv_jax.kernels.gather_attention import (  # pyright: ignore[reportMissingImports]
    Backend,
    gather_attention,
)
from swapkv_jax.kernels.versions import (  # pyright: ignore[reportMissingImports]
    gpu_interpreter,
    tpu_interpreter,
)

from swapkv_jax.attention_choice import slot_width
from swapkv_jax.errors import UsageError

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
INTERPRETED: dict[Backend, Any] = {
    "xla": False,
    "mosaic_tpu": tpu_interpreter(detect_races=True),
    "mosaic_gpu": gpu_interpreter(detect_races=True),
    "mosaic_hopper": gpu_interpreter(detect_races=True),
}
every_backend = pytest.mark.parametrize("backend", INTERPRETED)
# An interpreted kernel takes seconds to compile, so that the default suite has few of them.
but_hopper_slowly = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "mosaic_hopper")) for name in INTERPRETED],
)
kernels_slowly = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=[pytest.mark.slow] * (name != "xla")) for name in INTERPRETED]
)


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Three or four slots are a step already, so that few slots make several steps."""
    tpu = patch("swapkv_jax.kernels.gather_attention.mosaic_tpu.SLOT_BYTES", 2 * 16 * 1024)
    gpu = patch("swapkv_jax.kernels.gather_attention.mosaic_gpu.step_tokens", lambda dim: 16)
    hopper = patch("swapkv_jax.kernels.gather_attention.mosaic_hopper.STEP", 32)
    with tpu, gpu, hopper:
        yield


@dataclass(frozen=True)
class Case:
    """Sizes of one call, and what is special about it."""

    batch: int = 2
    heads: int = 2
    repeat: int = 3
    dim: int = 64
    slots: int = 12
    tokens: int = 4
    selected: int = 5
    dtype: str = "float32"
    seed: int = 0
    valid: float = 0.8  # share of entries
    fill: int = 0  # values of a packed token beyond K and V

    def inputs(self) -> dict[str, np.ndarray]:
        """Random operands; row 0 has no valid slot, and what may not be read is NaN."""
        rng = np.random.default_rng(self.seed)
        dtype = np.float32 if self.dtype == "float32" else ml_dtypes.bfloat16
        b, h, g, d = self.batch, self.heads, self.tokens, self.dim

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

        slots = np.stack([rng.permutation(self.slots)[: self.selected] for _ in range(b)]).astype(np.int32)
        valid = rng.random((b, self.selected)) < self.valid
        valid[0] = False
        newest = rng.integers(0, g, b, dtype=np.int32)
        width = 2 * d + self.fill
        pool, rolling = draw(b, h, self.slots, g, width), draw(b, h, g, width)
        for row in range(b):
            unread = np.setdiff1d(np.arange(self.slots), slots[row][valid[row]])
            pool[row, :, unread] = np.nan
            rolling[row, :, newest[row] + 1 :] = np.nan
        # An entry that is not valid may name no slot at all.
        slots[~valid] = rng.choice([0, -1, self.slots + 5], (~valid).sum())
        return {
            "q": draw(b, h, self.repeat, d) * np.asarray(2, dtype),
            "pool": pool,
            "slots": slots,
            "valid": valid,
            "rolling": rolling,
            "newest": newest,
        }


def served(case: Case, backend: Backend) -> Case:
    """The nearest case of sizes that a backend serves."""
    if backend != "mosaic_hopper":
        return case
    return replace(
        case,
        dtype="bfloat16",
        tokens=8 if case.tokens <= 8 else 16,
        dim={80: 64, 96: 128}.get(case.dim, case.dim),
        fill=64 if case.fill else 0,
    )


def expected(x: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64, row by row, head by head."""
    out, lse = np.zeros(x["q"].shape), np.full(x["q"].shape[:3], -np.inf)
    for row, head in np.ndindex(*x["q"].shape[:2]):
        chosen = x["slots"][row][x["valid"][row]]
        last = x["newest"][row] + 1

        dim = x["q"].shape[-1]
        kept = x["pool"][row, head, chosen].reshape(-1, x["pool"].shape[-1])
        kv = np.concatenate([kept, x["rolling"][row, head, :last]]).astype(np.float64)
        k, v = kv[:, :dim], kv[:, dim : 2 * dim]
        if not len(k):
            continue
        scores = x["q"][row, head].astype(np.float64) @ k.T * k.shape[1] ** -0.5
        lse[row, head] = np.logaddexp.reduce(scores, axis=1)
        out[row, head] = np.exp(scores - lse[row, head][:, None]) @ v
    return out, lse


def check(case: Case, backend: Backend, tolerance: float | None = None, **changes: np.ndarray) -> None:
    case = served(case, backend)
    x = case.inputs() | changes
    want, want_lse = expected(x)
    out, lse = gather_attention(**x, backend=backend, interpret=INTERPRETED[backend])
    assert out.dtype == case.dtype
    assert lse.dtype == np.float32
    tolerance = TOLERANCE[case.dtype] if tolerance is None else tolerance
    near = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    near(np.asarray(out, np.float64), want)
    near(np.asarray(lse, np.float64), want_lse)


@every_backend
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_float64(dtype: str, backend: Backend) -> None:
    check(Case(dtype=dtype), backend)


CASES = {
    "one query, one head, one token": Case(heads=1, repeat=1, tokens=1),
    "many steps": Case(slots=40, selected=37, tokens=3),
    "sixteen tokens": Case(tokens=16, dtype="bfloat16", slots=13, selected=11),
    "sixteen queries": Case(repeat=16, dim=80, tokens=8),
    "slots that are no multiple of 128 bytes": Case(dim=80, tokens=1, dtype="bfloat16"),
    "tokens wider than K and V": Case(dim=80, fill=96),
    "heads of whole lanes": Case(dim=128),
    "all valid": Case(valid=1.1),
    "none valid": Case(valid=-1.0),
}


@kernels_slowly
@pytest.mark.parametrize("name", CASES)
def test_special_sizes(name: str, backend: Backend) -> None:
    check(CASES[name], backend)


@kernels_slowly
def test_nothing_at_all_gives_zeros_and_minus_infinity(backend: Backend) -> None:
    case = served(Case(valid=-1.0), backend)
    nan = np.full_like(case.inputs()["rolling"], np.nan)
    check(case, backend, newest=np.full(2, -1, np.int32), rolling=nan)


@kernels_slowly
def test_scores_far_below_or_above_zero_do_not_overflow(backend: Backend) -> None:
    case = served(Case(), backend)
    x = case.inputs()
    dtype = x["q"].dtype
    for sign in (-1, 1):
        near = {name: x[name].copy() for name in ("pool", "rolling")}
        for array in near.values():
            keys = array[..., : case.dim]
            keys[...] = np.abs(keys) * np.asarray(30, dtype)
        # Scores of thousands have lost the digits that 1e-5 would need.
        tolerance = max(2e-3, TOLERANCE[case.dtype])
        check(case, backend, tolerance, q=np.abs(x["q"]) * np.asarray(sign * 8, dtype), **near)


@kernels_slowly
def test_order_of_slots_does_not_matter(backend: Backend) -> None:
    case = served(Case(valid=1.1), backend)
    x = case.inputs()
    order = np.random.default_rng(1).permutation(x["slots"].shape[1])
    check(case, backend, slots=x["slots"][:, order], valid=x["valid"][:, order])


def random_cases(**limits: Any) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        batch=st.integers(1, 2),
        heads=st.integers(1, limits["heads"]),
        repeat=st.integers(1, 16),
        dim=st.sampled_from(limits["dims"]),
        slots=st.integers(limits["selected"], limits["selected"] + 20),
        tokens=st.integers(1, 16),
        selected=st.integers(1, limits["selected"]),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        seed=st.integers(0, 99),
        valid=st.sampled_from([0.1, 0.9]),
        fill=st.sampled_from([0, 32]),
    )


@but_hopper_slowly
@settings(max_examples=2, deadline=None, derandomize=True)
@given(case=random_cases(heads=2, dims=[64, 80], selected=5))
def test_random_shapes(case: Case, backend: Backend) -> None:
    check(case, backend)


@pytest.mark.slow
@every_backend
@settings(max_examples=20, deadline=None)
@given(case=random_cases(heads=16, dims=[64, 80, 96, 128, 256], selected=60))
def test_more_random_shapes(case: Case, backend: Backend) -> None:
    check(case, backend)


def test_two_parts_join_by_their_log_sum_exps() -> None:
    case = Case(valid=1.1)
    x = case.inputs()
    first = np.arange(case.selected) < 3
    parts = [
        gather_attention(**(x | {"valid": x["valid"] & first}), backend="xla"),
        gather_attention(
            **(x | {"valid": x["valid"] & ~first, "newest": np.full(2, -1, np.int32)}), backend="xla"
        ),
    ]
    out, lse = expected(x)
    weights = [np.exp(np.asarray(part[1]) - lse)[..., None] for part in parts]
    joined = sum(np.asarray(part[0]) * weight for part, weight in zip(parts, weights, strict=True))
    np.testing.assert_allclose(joined, out, rtol=1e-5, atol=1e-5)


def test_auto_is_xla_on_a_cpu() -> None:
    x = Case().inputs()
    auto, xla = (gather_attention(**x, backend=backend) for backend in ("auto", "xla"))
    np.testing.assert_array_equal(auto[0], xla[0])
    text = (
        jax.jit(partial(gather_attention, backend="auto"))
        .trace(**x)
        .lower(lowering_platforms=("cpu",))
        .as_text()
    )
    assert "custom_call" not in text


@pytest.mark.parametrize(
    ("backend", "platform"),
    [
        ("mosaic_tpu", "tpu"),
        ("mosaic_gpu", "cuda"),
        ("mosaic_tpu", None),
        ("mosaic_gpu", None),
        ("mosaic_hopper", None),
    ],
)
def test_a_kernel_off_its_platform_says_so(backend: Backend, platform: str | None) -> None:
    operands = served(Case(), backend).inputs()

    def lower() -> None:
        if platform is None:
            gather_attention(**operands, backend=backend)
        else:
            traced = jax.jit(partial(gather_attention, backend=backend)).trace(**operands)
            traced.lower(lowering_platforms=(platform, "cpu"))

    with pytest.raises(UsageError, match=f"'{backend}' runs on .*, not on cpu: use 'xla' or 'auto'"):
        lower()


@pytest.mark.parametrize("backend", ["auto", "mosaic_tpu"])
def test_the_tpu_kernel_lowers_without_a_tpu(backend: Backend) -> None:
    traced = jax.jit(partial(gather_attention, backend=backend)).trace(**Case().inputs())
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [2, 4, 16])
@pytest.mark.parametrize("dim", [80, 128])
@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:2x2"])
def test_the_tpu_kernel_compiles_without_a_tpu(
    target: str, dim: int, tokens: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    device = topologies.get_topology_desc(platform="tpu", topology_name=target).devices[0]
    place = SingleDeviceSharding(device)
    fill = slot_width("mosaic_tpu", dim) - 2 * dim
    operands = Case(slots=200, tokens=tokens, dtype=dtype, dim=dim, heads=3, fill=fill).inputs()
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for name, x in operands.items()}
    compiled = jax.jit(partial(gather_attention, backend="auto")).trace(**shapes).lower().compile()
    text = compiled.as_text()
    assert text is not None
    assert "tpu_custom_call" in text
    # Nothing copies the pool.
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < operands["pool"].nbytes


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(tokens=8), "mosaic_hopper serves dtype of bfloat16, not float32"),
        (Case(dtype="bfloat16"), "mosaic_hopper serves group_tokens of one of 8, 16, not 4"),
        (
            Case(dtype="bfloat16", tokens=8, dim=80),
            "mosaic_hopper serves head_dim of one of 64, 128, 256, not 80",
        ),
        (Case(dtype="bfloat16", tokens=8, fill=32), "mosaic_hopper serves W of a multiple of 64, not 160"),
    ],
)
def test_sizes_that_the_hopper_kernel_does_not_serve(case: Case, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gather_attention(**case.inputs(), backend="mosaic_hopper", interpret=True)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(tokens=17), "group tokens G is 17"),
        (Case(dim=72), "head dim D is 72"),
        (Case(repeat=17), "queries per KV head R is 17"),
        (Case(heads=17), "KV heads Hkv is 17"),
    ],
)
def test_sizes_that_no_kernel_serves(case: Case, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gather_attention(**case.inputs())


def test_operands_that_do_not_fit_each_other() -> None:
    x = Case().inputs()
    with pytest.raises(UsageError, match="backend 'triton' is unknown: use one of auto, xla"):
        gather_attention(**x, backend="triton")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="interpret=True needs a kernel"):
        gather_attention(**x, backend="auto", interpret=True)
    with pytest.raises(UsageError, match=r"pool is bfloat16\[2, 2, 12, 4, 128\]; .* must be float32"):
        gather_attention(**(x | {"pool": replace(Case(), dtype="bfloat16").inputs()["pool"]}))
    with pytest.raises(UsageError, match=r"with W at least 2·D"):
        gather_attention(**(x | {"q": np.zeros((2, 2, 3, 80), np.float32)}))
    with pytest.raises(UsageError, match="newest is int32"):
        gather_attention(**(x | {"newest": x["newest"][:1]}))
    with pytest.raises(UsageError, match=r"want \[B, Hkv, R, D\]"):
        gather_attention(**(x | {"q": jnp.zeros((2, 64), jnp.float32)}))
