"""The decode command's plan: why it is chosen, from which rates, and plans from files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny import tiny_checkpoint

from swapkv_jax import PlanError, UsageError, make_plan
from swapkv_jax.decode import main
from swapkv_jax.decode_plan import decode_plan
from swapkv_jax.disk_curve import DiskCurve
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.models.named import named_geometry
from swapkv_jax.options import check_flags, make_parser
from swapkv_jax.plan import Plan
from swapkv_jax.plan_files import PlanFile, load_plan, parse_plan
from swapkv_jax.planner import Needs
from swapkv_jax.rates import DeviceRates
from swapkv_jax.resources import DeviceMemory


def named(name: str) -> Geometry:
    geometry = named_geometry(name)
    assert geometry is not None
    return geometry


SMALL = named("smollm2-135m")
RATES = DeviceRates(
    identity="here", measured="2026-01-01T00:00:00+00:00", memory=2e10, to_device=1e10, from_device=1e10
)
CURVE = DiskCurve(
    identity="here", measured="2026-01-01T00:00:00+00:00", direct=True, reader="kernel", sizes=(4096, 1 << 20),
    depths=(1, 64), rates=((1e8, 5e8), (1e9, 2e9)),
)  # fmt: skip


def plan_for(*flags: str, lengths: tuple[int, ...] = (900,), geometry: Geometry = SMALL) -> tuple[Plan, str]:
    """`decode_plan` for flags, as the command calls it."""
    options = make_parser().parse_args(["--prompt", "hi", *flags])
    check_flags(options)
    return decode_plan(options, geometry, lengths, options.dtype or "float32")


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Nothing was ever measured on this machine, or what is said."""

    def here(rates: DeviceRates | None = None, curve: DiskCurve | None = None) -> None:
        monkeypatch.setattr("swapkv_jax.rates.saved_device_rates", lambda: (rates, ""))
        monkeypatch.setattr("swapkv_jax.disk_curve.saved_disk_curve", lambda directory: (curve, ""))

    here()
    return here


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> dict[str, PlanFile]:
    """What ships with the package: nothing, until a test says so."""
    plans: dict[str, PlanFile] = {}
    monkeypatch.setattr("swapkv_jax.plan_files.shipped_plans", lambda: plans)
    return plans


# --- the reasons ---


@pytest.mark.usefixtures("unmeasured", "shipped")
def test_auto_says_why() -> None:
    plan, why = plan_for("--max-new-tokens", "100")
    assert (plan.policy, plan.max_context) == ("resident", 1000)
    assert why.startswith("why: all KV fits on the device\n")
    assert "the description of cpu (python -m swapkv_jax.resources --measure would tell)" in why
    for flags in (["--cache", "resident"], ["--tier", "disk"], ["--cache", "group"]):
        assert plan_for(*flags)[1] == "", f"{flags} leave no choice"


@pytest.mark.usefixtures("shipped")
def test_auto_goes_by_what_was_measured(unmeasured: Callable[..., None]) -> None:
    weights = Needs.of(make_plan(SMALL, cache="resident"), SMALL).weights
    tight = [
        "--device-memory",
        str(weights + (100 << 20)),
        "--dram-memory",
        "40MiB",
        "--max-new-tokens",
        "100",
    ]
    lengths = (7000,)
    assert plan_for(*tight, lengths=lengths)[0].policy == "group"
    assert plan_for(*tight, "--exact", lengths=lengths)[0].policy == "layer"
    assert plan_for(*tight, "--max-overhead", "50", lengths=lengths)[0].tier == "disk"
    unmeasured(RATES, CURVE)
    _, why = plan_for(*tight, lengths=lengths)
    assert "by memory and link as measured here, disk as measured here)" in why
    slow_memory = msgspec.structs.replace(RATES, memory=1e9)
    unmeasured(slow_memory, None)
    plan, why = plan_for(*tight, lengths=lengths)
    assert plan.policy == "layer", "next to slow memory the disk is fast"
    assert "by memory and link as measured here, the description of cpu" in why


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--exact", "--cache", "group"], "--exact rules out"),
        (["--max-overhead", "-1"], "0 or more"),
        (["--max-overhead", "nan"], "0 or more"),
        (["--max-context", "500"], "over the limit of 500"),
        (["--device-memory", "1MiB"], "the smallest, layer, takes"),
    ],
)
def test_flags_that_cannot_work(flags: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_for(*flags)


def test_the_command_prints_the_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_checkpoint("llama", tmp_path))
    command = ["--model", model, "--raw", "--prompt", "a b c", "--max-new-tokens", "2"]
    assert main([*command, "--dry-run"]) == 0
    out, err = capfd.readouterr()
    assert Plan.from_json(out).policy == "resident"
    assert "why: all KV fits" in err
    assert " *  resident" in err
    assert main([*command, "--dry-run", "--quiet"]) == 0
    assert "why:" not in capfd.readouterr().err
    assert main([*command, "--dry-run", "--exact", "--tier", "disk"]) == 0
    assert "why:" not in capfd.readouterr().err


# --- plans as files ---


def plan_file(plan: Plan, **changes: Any) -> PlanFile:
    fields: dict[str, Any] = {
        "status": "predicted",
        "model": "smollm2-135m",
        "device": "cpu",
        "predicted": {},
    }
    return PlanFile(**{**fields, "plan": plan, **changes})


def test_both_forms_of_file(tmp_path: Path) -> None:
    plan = make_plan(SMALL, cache="group", max_context=2000)
    file = plan_file(plan, status="measured", measured={"step_s": 0.1}, note="on a quiet machine")
    assert parse_plan(file.to_json(), "x") == file
    assert parse_plan(plan.to_json(), "x") == plan
    for name, text in (("file", file.to_json()), ("plan", plan.to_json())):
        path = tmp_path / f"{name}.json"
        path.write_text(text)
        assert load_plan(str(path)) == plan
        assert plan_for("--plan", str(path))[0] == plan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"colour": "red"}, "unknown field `colour`"),
        ({"status": "guessed"}, "guessed"),
        ({"status": "measured"}, "goes with what was measured"),
        ({"measured": {"step_s": 1}}, "goes with what was measured"),
        ({"plan": {"policy": "resident"}}, "missing required field"),
    ],
)
def test_files_that_are_none(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    record = json.loads(plan_file(make_plan(SMALL)).to_json())
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**record, **change}))
    with pytest.raises(PlanError, match=words) as caught:
        load_plan(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(PlanError, match=r"such as llama-3\.1-8b-l4-b8") as caught:
        load_plan("llama-3.1-8b-l4-b9")
    assert len(str(caught.value)) < 250


def test_a_group_plan_is_not_exact(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(make_plan(SMALL, cache="group", max_context=2000).to_json())
    with pytest.raises(PlanError, match="--exact rules it out"):
        plan_for("--plan", str(path), "--exact")


# --- plans that ship ---


@pytest.mark.usefixtures("unmeasured")
def test_a_shipped_plan_is_taken_for_its_model_and_device(shipped: dict[str, PlanFile]) -> None:
    tuned = make_plan(SMALL, cache="resident", max_context=4000, prefill_chunks=(32, 128))
    shipped["tuned"] = plan_file(tuned)
    plan, why = plan_for("--max-new-tokens", "100")
    assert plan == msgspec.structs.replace(tuned, max_context=1000)
    assert "shipped plan tuned (predicted, fitted to 1000 tokens); --plan tuned takes it as it is" in why
    assert plan_for("--plan", "tuned")[0] == tuned
    assert plan_for("--max-context", "4000")[0] == tuned
    better = msgspec.structs.replace(tuned, prefill_chunks=(128,))
    shipped["better"] = plan_file(better, status="measured", measured={"step_s": 0.05})
    assert plan_for("--max-context", "4000")[0] == better, "measured goes before predicted"


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("changes", "flags", "lengths"),
    [
        ({"device": "h100"}, [], (900,)),
        ({"model": "qwen3-4b"}, [], (900,)),
        ({}, ["--dtype", "bfloat16"], (900,)),
        ({}, [], (900, 900)),
        ({}, [], (4000,)),
        ({}, [], (100,)),
        ({}, ["--cache", "layer"], (900,)),
        ({}, ["--device-memory", "560MB"], (900,)),
    ],
)
def test_a_shipped_plan_is_not_taken_for_anything_else(
    shipped: dict[str, PlanFile], changes: dict[str, Any], flags: list[str], lengths: tuple[int, ...]
) -> None:
    tuned = make_plan(SMALL, cache="resident", max_context=4000, prefill_chunks=(32, 128))
    shipped["tuned"] = plan_file(tuned, **changes)
    plan, why = plan_for(*flags, lengths=lengths)
    assert plan.prefill_chunks != tuned.prefill_chunks
    assert "shipped" not in why


# --- other machines ---


def machine(monkeypatch: pytest.MonkeyPatch, name: str, free: int, host: int) -> None:
    """As if JAX had found a GPU of this kind with `free` bytes, in a host with `host` bytes to spare."""
    found = DeviceMemory(name=name, platform="gpu", free=free, total=free, shared=False)
    monkeypatch.setattr("swapkv_jax.resources.device_memory", lambda: (found,))
    monkeypatch.setattr("swapkv_jax.decode_plan.available_memory", lambda: host)
    monkeypatch.setattr("swapkv_jax.staging.compute_capability", lambda: 8.9)


@pytest.mark.usefixtures("unmeasured")
def test_a_gpu_gets_the_plan_that_ships_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "NVIDIA L4", 23 << 30, 60 << 30)
    flags = ["--dtype", "bfloat16", "--max-context", "30000"]
    plan, why = plan_for(*flags, lengths=(20_000,) * 8, geometry=named("llama-3.1-8b"))
    assert (plan.policy, plan.tier, plan.batch, plan.max_context) == ("group", "dram", 8, 30_000)
    assert "by the description of l4 (" in why
    assert "shipped plan llama-3.1-8b-l4-b8 (predicted, fitted to 30000 tokens)" in why
    plan, why = plan_for(*flags, "--exact", lengths=(20_000,) * 8, geometry=named("llama-3.1-8b"))
    assert (plan.policy, plan.tier) == ("layer", "dram")
    assert "shipped" not in why


@pytest.mark.usefixtures("unmeasured", "shipped")
def test_an_unknown_gpu_prefers_what_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "Abacus", 2 << 30, 60 << 30)
    plan, why = plan_for("--dtype", "bfloat16", lengths=(8000,) * 16)
    assert (plan.policy, plan.tier) == ("layer", "dram")
    assert "how long moving it takes is unknown" in why
    assert "by unknown (python -m swapkv_jax.resources --measure would tell)" in why


@pytest.mark.usefixtures("unmeasured", "shipped")
def test_memory_that_is_shared_is_spent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Jetson's GPU computes in the host's memory: layers in DRAM would save nothing."""
    for host, policy in ((4 << 30, "resident"), (2 << 30, "group")):
        machine(monkeypatch, "Orin", 64 << 30, host)
        plan, _ = plan_for("--dtype", "bfloat16", lengths=(8000,) * 16)
        needs = Needs.of(plan, SMALL)
        assert plan.policy == policy
        assert needs.memory <= host
