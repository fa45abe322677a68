"""Flags for what a plan of policy `group` fixes: one per field of `Selection`, and the shape of its records."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from flag_types import count

from swapkv_jax.plan import KVDType
from swapkv_jax.planner import GROUP_SIZE, SELECTION
from swapkv_jax.selection import Selection

_BY_POLICY = ("strategy", "outlier_groups")  # not of `group`, see `policies`
ABOUT = (
    "What each flag of a selection means stands at the fields of swapkv_jax/selection.py. Given none, a model whose "
    "layers were measured has a plan of its own on a CPU."
)
SHAPE = {"group_tokens": int, "record_alignment": int, "kv_dtype": KVDType}  # of records
_SHORT = {"sink_groups": "--sink", "recent_groups": "--recent"}


def add_selection_flags(parser: argparse._ActionsContainer) -> None:
    """Adds a flag per field of `Selection`, `--group-tokens` and `--record-alignment`; all default to None.

    A field that is a list takes commas, one that is nested takes JSON, one that may be empty or unset "none".
    """
    for field, hint in get_type_hints(Selection).items():
        if field in _BY_POLICY:
            continue
        names = ["--" + field.replace("_", "-")]
        names += [_SHORT[field]] if field in _SHORT else []
        helped = f"default, if any of these is given: {written(getattr(SELECTION, field))}"
        if get_origin(hint) is Literal:
            parser.add_argument(*names, dest=field, choices=get_args(hint), help=helped)
        else:
            parse = functools.partial(parse_value, hint=hint)
            parser.add_argument(*names, dest=field, type=parse, metavar=_metavar(hint), help=helped)
    parser.add_argument(
        "--group-tokens", type=count, metavar="G", help=f"tokens per group (default {GROUP_SIZE})"
    )
    parser.add_argument(
        "--record-alignment",
        type=count,
        metavar="BYTES",
        help="that a record on disk is rounded up to (default 4096)",
    )


def given_choices(args: argparse.Namespace) -> dict[str, Any]:
    """Those of the flags that were given, by field; without `--kv-dtype`, which is not of `group` alone."""
    names = (*Selection.__struct_fields__, "group_tokens", "record_alignment")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def group_choices(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say to `make_plan` of policy `group`."""
    return plan_choices(given_choices(args))


def plan_choices(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Selection` and of `SHAPE` as `make_plan` takes them, which has a default of its own for a selection
    that nobody touches. Slots that were not asked for follow M."""
    given = dict(choices)
    shape = {name: given.pop(name) for name in SHAPE if name in given}
    if not given:
        return shape
    choice = msgspec.structs.replace(SELECTION, **given)
    if "reuse_slots" not in given:
        choice = msgspec.structs.replace(choice, reuse_slots=max(choice.reuse_slots, choice.selected_groups))
    return {"selection": choice, **shape}


def choice_hints() -> dict[str, Any]:
    """The type of everything that may be chosen for a policy that selects, by name."""
    hints = {**get_type_hints(Selection), **SHAPE}
    del hints["strategy"]
    return hints | {"outlier_groups": int}  # unset but for shadowkv


def parse_value(text: str, hint: Any) -> Any:
    """`text` as a value of type `hint`: as it stands, else as JSON, else cut at commas; "none" is nothing.

    Raises:
      ArgumentTypeError: it fits in no way.
    """
    if text == "none" and msgspec.UnsetType in get_args(hint):
        return msgspec.UNSET
    if text == "none" and get_origin(hint) is tuple:
        return ()
    candidates: list[Any] = [text]
    try:
        candidates.append(json.loads(text))
    except ValueError:
        candidates.append(text.split(","))
    else:
        candidates.append([text])
    reason = ""
    for candidate in candidates:
        try:
            return msgspec.convert(candidate, hint, strict=False)
        except msgspec.ValidationError as error:
            reason = reason or str(error)
    raise argparse.ArgumentTypeError(f"{text!r} does not fit: {reason}")


def _metavar(hint: Any) -> str:
    return "N[,N]" if "tuple" in str(hint) else "N" if {int, float} & {hint, *get_args(hint)} else "VALUE"


def written(value: Any) -> str:
    """A field's value as its flag takes it."""
    if value is msgspec.UNSET or value == ():
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
