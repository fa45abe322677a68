"""Writes the plans that ship with the package: for each model and described device what `auto` would choose there.

    python tools/make_plans.py           # rewrites plans/*.json
    python tools/make_plans.py --check   # exit code 1 if that would change a file

Each is a prediction, but for those that were measured (`_MEASURED`). Plans that a tuner wrote are left alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swapkv_jax.devices import Device, device_names, find_device
from swapkv_jax.errors import PlanError
from swapkv_jax.models.named import named_geometry
from swapkv_jax.plan_files import Numbers, PlanFile
from swapkv_jax.planner import Budgets, Candidate, Rates, Request, choose_plan

PLANS = Path(__file__).parents[1] / "plans"
_MODELS = ("llama-3.1-8b", "llama-3.2-3b", "qwen3-4b", "qwen3-8b", "qwen3-14b")
_SMALL = "smollm2-135m"
_BATCHES = (1, 8)
_USABLE = 0.9  # of a device's memory: the compiler's temporaries and the runtime take some, too

_MEASURED_AT = "tools/performance.md; two cores, 7,680 tokens of context"
_MEASURED: dict[str, Numbers] = {
    "smollm2-135m-cpu-b1": {"step_s": 0.0539, "context": 7680, "source": _MEASURED_AT},
    "smollm2-135m-cpu-b8": {"step_s": 0.227, "context": 7680, "source": _MEASURED_AT},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan to make."""

    model: str
    device: str
    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.device}-b{self.batch}"


def cases() -> Iterator[Case]:
    """Every plan that ships."""
    for batch in _BATCHES:
        yield Case(model=_SMALL, device="cpu", batch=batch, context=8192)
    for device in device_names():
        for model in _MODELS if find_device(device).platform != "cpu" else ():
            for batch in _BATCHES:
                yield Case(model=model, device=device, batch=batch, context=32_768)


def make(case: Case) -> PlanFile:
    """The plan of a case. PlanError: none fits the device."""
    geometry, device = named_geometry(case.model), find_device(case.device)
    assert geometry is not None
    request = Request(
        geometry=geometry,
        batch=case.batch,
        max_context=case.context,
        dtype="float32" if device.platform == "cpu" else "bfloat16",
        group_size=device.disk.group_tokens,
        platform=device.platform,
        capability=device.capability,
        budgets=_budgets(device),
    )
    choice = choose_plan(request, Rates.of(device))
    chosen = next(candidate for candidate in choice.candidates if candidate.plan == choice.plan)
    measured = _MEASURED.get(case.name)
    return PlanFile(
        status="predicted" if measured is None else "measured",
        model=case.model,
        device=case.device,
        predicted=_forecast(chosen),
        measured=measured,
        note=choice.reason,
        plan=choice.plan,
    )


def _budgets(device: Device) -> Budgets:
    memory = int(_USABLE * device.device_memory.value)
    if device.dram is None:
        return Budgets(host=memory, disk=device.disk.space)
    return Budgets(device=memory, dram=int(_USABLE * device.dram.value), disk=device.disk.space)


def _forecast(chosen: Candidate) -> Numbers:
    assert chosen.cost is not None
    assert chosen.overhead is not None
    needs = chosen.needs
    return {
        "step_s": float(f"{chosen.cost.step_s:.4g}"),
        "overhead": round(chosen.overhead, 3),
        "device_bytes": needs.device,
        "dram_bytes": needs.dram,
        "disk_bytes": needs.disk,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code."""
    parser = argparse.ArgumentParser(description="Writes the plans that ship with the package.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a file would change"
    )
    parser.add_argument("--out", type=Path, default=PLANS, metavar="DIR", help="directory (default: plans/)")
    options = parser.parse_args(argv)
    changed = 0
    for case in cases():
        path = options.out / f"{case.name}.json"
        try:
            text = make(case).to_json()
        except PlanError as error:
            print(f"{case.name}: no plan ({str(error).split(';')[0]})")
            continue
        if not path.exists() or path.read_text() != text:
            changed += 1
            print(f"{case.name}: {'would change' if options.check else 'written'}")
            if not options.check:
                path.write_text(text)
    return int(options.check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
