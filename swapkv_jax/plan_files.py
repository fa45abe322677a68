"""Plans as files: alone, or with the model and device they are for and what was predicted or measured of them."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec

from swapkv_jax.errors import PlanError
from swapkv_jax.models.geometry import Geometry
from swapkv_jax.models.named import name_of
from swapkv_jax.plan import Plan

Status = Literal["predicted", "measured"]
Numbers = dict[str, float | int | str | None]


class PlanFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan and what is known of it.

    Attributes:
      status: whether its speed was measured on the device, or only predicted.
      model, device: by the names of `models.named` and `devices`.
      predicted, measured: by name, sizes in bytes and times in seconds; `step_s` is one decode step at full context.
      note: for people.
    """

    status: Status
    model: str
    device: str
    predicted: Numbers
    measured: Numbers | None = None
    note: str | None = None
    plan: Plan

    def __post_init__(self) -> None:
        if (self.status == "measured") != (self.measured is not None):
            raise ValueError("status measured goes with what was measured, predicted with nothing")

    def to_json(self) -> str:
        """JSON, fields in the order of this class."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"


def parse_plan(text: str | bytes, source: str) -> Plan | PlanFile:
    """A plan in either form. PlanError names what is wrong and the fields that there are."""
    try:
        record = msgspec.json.decode(text)
        if isinstance(record, dict) and "plan" in record:
            return msgspec.json.decode(text, type=PlanFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanError(
            f"{source} is not a plan: {error}; the fields are {', '.join(PlanFile.__struct_fields__)}, those of plan "
            f"{', '.join(Plan.__struct_fields__)}"
        ) from None
    return Plan.from_json(text, source=source)


def load_plan(name: str) -> Plan:
    """A plan from a file, or one that ships with the package by its name without `.json`.

    Raises:
      PlanError: there is no such file, or it holds no plan.
    """
    shipped = shipped_plans()
    if name in shipped:
        return shipped[name].plan
    try:
        found = parse_plan(Path(name).read_bytes(), name)
    except OSError as error:
        likely = get_close_matches(name, shipped, n=3) or list(shipped)[:3]
        raise PlanError(
            f"cannot read plan {name}: {error.strerror}; give a file, or one of the {len(shipped)} plans that ship, "
            f"such as {', '.join(likely)}"
        ) from None
    return found.plan if isinstance(found, PlanFile) else found


@cache
def shipped_plans() -> dict[str, PlanFile]:
    """The plans that ship with the package, by name."""
    files = sorted(resources.files("swapkv_jax.plans").iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".json"): msgspec.json.decode(file.read_bytes(), type=PlanFile)
        for file in files
        if file.name.endswith(".json")
    }


def plans_for(geometry: Geometry, device: str) -> dict[str, PlanFile]:
    """The shipped plans for a model's shapes and a device of this name, measured ones first, by name."""
    model = name_of(geometry)
    found = [(n, f) for n, f in shipped_plans().items() if (f.model, f.device) == (model, device)]
    return dict(sorted(found, key=lambda item: (item[1].status != "measured", item[1].plan.max_context)))
