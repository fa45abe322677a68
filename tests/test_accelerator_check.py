"""tools/accelerator_check.py: all that a CPU can run of it, at tiny sizes; and that it fails when it should."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tool_runs import run_tool

TOOLS = Path(__file__).parents[1] / "tools"
Tools = Callable[[str], ModuleType]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Tools:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module


@pytest.mark.slow
def test_all_of_it_on_a_cpu(tools: Tools, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    done = run_tool(tools("gpu_check").main, ["--cpu", "--json", str(out)], out, capfd)
    assert done.code == 0, done.out
    findings = done.report["findings"]
    assert {f["part"] for f in findings} == {"kernel", "policy", "graphs", "rate", "step"}
    for part in ("policy", "graphs", "step"):
        whats = [f["what"].split()[0] for f in findings if f["part"] == part]
        assert whats == ["resident", "layer/dram", "layer/disk", "group"], part
    kernels = [f["what"].split()[0] for f in findings if f["part"] == "kernel" and f["passed"]]
    assert list(dict.fromkeys(kernels)) == ["xla", "mosaic_tpu", "mosaic_gpu", "mosaic_hopper"]
    assert all(f["passed"] in (True, None) for f in findings)
    assert done.out.splitlines()[-1] == f"{sum(f['passed'] is True for f in findings)} ok, 0 failed"


@pytest.mark.parametrize(
    ("change", "passes", "said"),
    [({}, True, "0 compiles, 0 of 12 buffers moved"), ({"compiles": 1}, False, "1 compiles"),
     ({"moved": ("kv.k.0",)}, False, "1 of 12 buffers moved"), ({"logits": 0.01}, False, "differ by 1.0e-02")],
)  # fmt: skip
def test_policies_are_held_against_the_reference(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], passes: bool, said: str
) -> None:
    policies = tools("accelerator_policies")
    expected = np.linspace(-2, 2, 24).reshape(2, 3, 4)
    run = policies._Run(expected, compiles=0, buffers=12, moved=(), step_s=1.0, ttft_s=1.0, launches=(0, 0))
    if "logits" in change:
        change = {"logits": expected + 2 * change["logits"]}
    monkeypatch.setattr(policies, "_decode", lambda *_: dataclasses.replace(run, **change))
    (*_, found) = policies.check_policies(policies.TINY, expected)
    assert found.passed is passes
    assert said in found.found


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        (None, ["xla"]),
        (8.0, ["xla"]),
        (9.0, ["xla", "mosaic_gpu", "mosaic_hopper"]),
        (10.0, ["xla", "mosaic_gpu"]),
    ],
)
def test_a_gpu_runs_the_kernels_of_its_generation(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, capability: float | None, expected: list[str]
) -> None:
    kernels = tools("accelerator_kernels")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "compute_capability", lambda: capability)
    assert [backend for backend, _ in kernels.backends(interpreted=False)] == expected
    served = {backend: len(kernels._served(backend, kernels.CASES)) for backend in expected}
    assert served == {backend: 3 if backend == "mosaic_hopper" else 10 for backend in expected}


def test_a_wrong_kernel_is_found(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = tools("accelerator_kernels")
    (right,) = kernels.check_kernels(kernels.TINY)
    assert right.passed
    real = kernels.gather_attention

    def wrong(*operands: Any, **choices: Any) -> tuple[jax.Array, jax.Array]:
        out, lse = real(*operands, **choices)
        return out + jnp.asarray(1e-4, out.dtype), lse

    monkeypatch.setattr(kernels, "gather_attention", wrong)
    (found,) = kernels.check_kernels(kernels.TINY)
    assert not found.passed
    monkeypatch.setattr(
        kernels, "gather_attention", lambda *o, **c: (real(*o, **c)[0] * np.nan, real(*o, **c)[1])
    )
    (found,) = kernels.check_kernels(kernels.TINY)
    assert not found.passed, "NaN is no small error"


def test_kernels_are_timed_beside_their_reads(tools: Tools) -> None:
    kernels = tools("accelerator_kernels")
    (found,) = kernels.time_kernels(kernels.TINY, bandwidth=1e9)
    case = kernels.TINY[0]
    read = case.batch * case.kv_heads * case.selected * case.group * 2 * case.head_dim * 4
    assert found.values["floor_s"] == pytest.approx(read / 1e9)
    assert found.values["seconds"] > 0


def test_launches_in_a_profile(tools: Tools) -> None:
    replay = tools("accelerator_replay")
    names = [
        "cuGraphLaunch",
        "cudaGraphLaunch_ptsz",
        "cuLaunchKernelEx",
        "cuMemcpyHtoDAsync",
        "thunk",
        "cuGraphCreate",
    ]
    assert replay.launches_among(names) == (2, 2)
    assert replay.count_launches(lambda: jnp.ones(3).block_until_ready()) == (0, 0)
    policies = tools("accelerator_policies")
    assert policies._replayed("group", 90, 12).passed
    assert policies._replayed("group", 0, 900).passed is False
    assert policies._replayed("group", 0, 0).passed is None


def test_graphs_that_are_wrong_fail(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, policies = tools("accelerator_replay"), tools("accelerator_policies")
    plans = {"resident": policies.planners(policies.TINY)["resident"]}
    (right,) = replay.check_graphs(plans, policies.TINY.geometry)
    assert right.passed, right.found
    monkeypatch.setattr(tools("portability_graph"), "lint", lambda *_: ["host callback (debug)"])
    (found,) = replay.check_graphs(plans, policies.TINY.geometry)
    assert not found.passed
    assert "segment: host callback (debug)" in found.found


def test_a_policy_that_raises_leaves_the_others(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = tools("accelerator_policies")

    def broken(model: Any, plan: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"no {plan.policy}")

    monkeypatch.setattr(policies, "_decode", broken)
    expected = ["no resident", "no layer", "no layer", "no group"]
    for found in (
        policies.check_policies(policies.TINY, np.zeros(1)),
        policies.time_policies(policies.TINY),
    ):
        said = [(f.found, f.passed) for f in found]
        assert said == [(f"RuntimeError: {message}", False) for message in expected]


def test_what_raises_or_comes_too_late_fails(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other parts still run."""
    check, finding = tools("accelerator_check"), tools("accelerator_findings").Finding
    clock = [0.0]

    def broken() -> list[Any]:
        raise RuntimeError("no such device\nand more")

    fine = finding(part="fine", what="w", found="f", passed=True)

    def slow() -> Iterator[Any]:
        yield fine
        clock[0] = 500.0
        yield dataclasses.replace(fine, what="slow")
        yield dataclasses.replace(fine, what="never")

    parts = {"broken": broken, "fine": slow, "late": lambda: [fine]}
    monkeypatch.setattr(check, "_parts", lambda tiny: parts)
    monkeypatch.setattr(check.time, "perf_counter", lambda: clock[0])
    out = tmp_path / "out.json"
    done = run_tool(check.main, ["--cpu", "--quiet", "--json", str(out)], out, capfd)
    assert done.code == 1
    assert [(f["part"], f["what"], f["found"], f["passed"]) for f in done.report["findings"]] == [
        ("broken", "the rest", "RuntimeError: no such device", False),
        ("fine", "w", "f", True),
        ("fine", "slow", "f", True),
        ("fine", "the rest", "8 minutes are over", False),
        ("late", "the rest", "8 minutes are over", False),
    ]
    assert done.out.splitlines()[-1] == "2 ok, 3 failed"
    assert done.err == ""


def test_usage(tools: Tools, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main = tools("accelerator_check").main
    assert main([]) == 2
    assert "there is no accelerator here; --cpu" in capfd.readouterr().err
    file = tmp_path / "reference.npy"
    assert main(["--write-reference", str(file), "--tiny"]) == 0
    assert np.load(file).shape == (5, 2, 256)
