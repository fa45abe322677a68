"""What `search_policies.py` writes and the other tools take by `--settings`: the best settings found, and every one
that was tried."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from selection_flags import choice_hints

from swapkv_jax import UsageError

Goal = Literal["least-loss", "fastest"]
GOALS: tuple[Goal, ...] = ("least-loss", "fastest")


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What one setting did in the engine.

    Attributes:
      kl, top1: mean divergence from `resident` (nats per token), share of equal likeliest tokens.
      seconds: of a step, all rows; None where times were not searched. read_bytes: per step, all rows and layers,
        once slots were full.
      reuse: selected groups that needed no read, as a fraction of all.
      memory: on the device and in DRAM, as a fraction of the whole KV's bytes.
      selected_groups, reuse_slots: M and C. plan: the hash of its plan.
    """

    kl: float
    top1: float
    seconds: float | None
    read_bytes: float
    reuse: float
    memory: float
    selected_groups: int
    reuse_slots: int
    plan: str


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that was tried: its `choices` as `--set` takes them, and what it did."""

    choices: dict[str, Any]
    trial: Trial


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy.

    Attributes:
      best: for each goal that some setting meets. points: all that were tried, in that order.
      notes: why a goal has none, or a search ended early.
    """

    best: dict[Goal, Point]
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()


class SettingsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A search: what all policies had in common, and what was found of each.

    Attributes:
      kv_memory: the fraction of the whole KV's bytes that each could take; `memory`: as it was asked for.
      context, batch, rows, tokens: tokens of a prompt, rows of the engine, rows and tokens of each compared.
      storage_profile: the disk's, None for the machine's own. loss: the bound of goal `fastest`, None
        where that was not searched.
    """

    version: Literal[1] = 1
    model: str
    dtype: str
    kv_memory: float
    memory: str
    context: int
    batch: int
    rows: int
    tokens: int
    texts: tuple[str, ...]
    storage_profile: str | None
    loss: float | None
    machine: str
    policies: dict[str, Outcome]

    def chosen(self, goal: Goal) -> dict[str, dict[str, Any]]:
        """Each policy's choices for a goal; a policy that does not meet it has those that lost least.

        Raises:
          UsageError: nobody searched for that goal.
        """
        if goal == GOALS[1] and self.loss is None:
            raise UsageError(
                f"nothing was searched for --goal {goal}; search again with --goals {','.join(GOALS)}"
            )
        hints = choice_hints()
        best = {
            name: found.best.get(goal) or found.best.get(GOALS[0]) for name, found in self.policies.items()
        }
        return {
            name: {field: msgspec.convert(value, hints[field]) for field, value in point.choices.items()}
            for name, point in best.items()
            if point is not None
        }

    def to_json(self) -> bytes:
        """Indented, for reading."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def load_settings(path: Path) -> SettingsFile:
    """Reads a file.

    Raises:
      UsageError: it cannot be read, is none of `search_policies.py`, or names a choice that there is not.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=SettingsFile)
        found.chosen(GOALS[0])
    except OSError as error:
        raise UsageError(
            f"cannot read --settings {path}: {error.strerror}; make it with search_policies.py"
        ) from None
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, KeyError) as error:
        raise UsageError(f"--settings {path} is not of search_policies.py: {error}; make it anew") from None
    return found
