"""The plans that ship: readable, sound for their model, inside their device, and what the planner would choose."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from swapkv_jax.devices import device_names, find_device
from swapkv_jax.models.named import named_geometry
from swapkv_jax.plan_files import plans_for, shipped_plans
from swapkv_jax.planner import Budgets, Needs, shortfalls

MODELS = ("llama-3.1-8b", "llama-3.2-3b", "qwen3-4b", "qwen3-8b", "qwen3-14b")


def test_every_plan_suits_its_model_and_device() -> None:
    for name, file in shipped_plans().items():
        geometry, device = named_geometry(file.model), find_device(file.device)
        assert geometry is not None, name
        assert file.device == device.name, name
        file.plan.validate(geometry)
        needs, memory = Needs.of(file.plan, geometry), device.device_memory.value
        dram = None if device.dram is None else device.dram.value
        budgets = Budgets(
            device=memory, dram=dram, disk=device.disk.space, host=memory if dram is None else None
        )
        assert not shortfalls(file.plan, geometry, budgets), name
        step = file.predicted["step_s"]
        assert isinstance(step, float), name
        assert 1e-4 < step < 10, name
        assert file.predicted.get("device_bytes", needs.device) == needs.device, name
        if file.measured is not None:
            assert file.measured["step_s"], name
            assert file.measured["source"], name


def test_every_model_has_a_plan_for_every_device_that_holds_its_weights() -> None:
    for model in MODELS:
        geometry = named_geometry(model)
        assert geometry is not None
        for device in device_names():
            if find_device(device).platform == "cpu":
                continue
            found = plans_for(geometry, device)
            rows = {file.plan.batch for file in found.values()}
            weights = 2 * (geometry.layers * geometry.hidden * geometry.intermediate * 3)  # most of them
            assert rows == {1, 8} or (not rows and weights > find_device(device).device_memory.value / 2)
    small = named_geometry("smollm2-135m")
    assert small is not None
    plans = plans_for(small, "cpu")
    assert {(f.plan.policy, f.plan.batch) for f in plans.values()} >= {("resident", 1), ("resident", 8)}
    assert next(iter(plans.values())).status == "measured"


def test_they_are_what_the_generator_makes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Fails when the planner's choices changed: `python tools/make_plans.py` then rewrites the plans."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    tool = importlib.import_module("make_plans")
    assert tool.main(["--check"]) == 0, capsys.readouterr().out
    assert "would change" not in capsys.readouterr().out
    case = next(tool.cases())
    (tmp_path / f"{case.name}.json").write_text("{}")
    assert tool.main(["--check", "--out", str(tmp_path)]) == 1
    assert "would change" in capsys.readouterr().out
    assert [path.read_text() for path in tmp_path.iterdir()] == ["{}"]
