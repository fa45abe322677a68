"""The portability report as a page of documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from portability_table import details, gib, good_graphs, of_graphs

COMMAND = "python tools/portability.py --markdown tools/portability.md"
COLUMNS = (
    ("plan", "the planner's plan of that policy and tier; under `group`, what attends the slots"),
    ("graphs", "decode graphs that passed every check, of all"),
    ("planned", "bytes of the plan's device buffers"),
    (
        "compiled",
        "what those take as the compiler lays them out, padding included (v4 may leave the spare of `layer` unused)",
    ),
    ("temporaries", "the most that one graph takes while it runs, beside its arguments and the plan's slots"),
    ("weights", "their bytes, the same under every plan"),
    ("buffers", "command buffers (CUDA graphs) of all graphs; a graph of fewer than five launches is none"),
    ("launches", "kernels, copies and products of the segment, all of them nodes of its one command buffer"),
)
INTRODUCTION = """\
# Portability

Every graph that a decode step runs, lowered and compiled ahead of time by the compilers of devices that were not
there. Rewritten by

```
{command}
```

which needs the extras `aot-tpu` and `aot-cuda` (`make portability` installs them). jax {jax}{compilers}.

A graph passes if it has no callback into Python and no dynamic shape; exports for its platform; compiles; takes the
bytes that the plan says, within 2 %, on the device and in host memory (which only a TPU's graphs read); gives back
every donated buffer in place; and holds the kernel that its plan names (as a custom call) and no other. On a GPU,
further, if it has no loop and touches no host memory, and all of it is one command buffer. A row fails if one of its
graphs does.
*Does not fit*: one device of the kind has too little memory for plan and weights; the plan is sound, but for more
or larger devices. *Too large*: the compiler was not asked, or found no room, for a graph.

Sizes are GiB on one device.
"""


def page(report: dict[str, Any]) -> str:
    """The whole page: what was checked, a table per model, and what failed or was skipped, by name."""
    compilers = "".join(f", {name} {version}" for name, version in report["compilers"].items())
    lines = [INTRODUCTION.format(command=COMMAND, jax=report["jax"], compilers=compilers)]
    lines += [f"* *{name}*: {meaning}" for name, meaning in COLUMNS]
    for model in dict.fromkeys(row["model"] for row in report["rows"]):
        lines += ["", *_table([row for row in report["rows"] if row["model"] == model])]
    found = [line for row in report["rows"] for line in details(row)]
    found += [f"{name}: {reason}" for name, reason in report["skipped"].items()]
    if found:
        lines += ["", "## What did not pass", "", *(f"* {line}" for line in found)]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    first = rows[0]
    yield f"## {first['model']}, {first['batch']} rows of {first['context']:,} tokens"
    yield ""
    yield "| target | " + " | ".join(name for name, _ in COLUMNS) + " | |"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    for row in rows:
        plan = row["plan"] if row["policy"] != "group" else f"group, {row['attention']}"
        cells = [
            row["target"],
            plan,
            good_graphs(row),
            *(gib(row[key], "0.3f") for key in ("planned", "compiled", "temporaries", "weights")),
            of_graphs(row, "command_buffers"),
            of_graphs(row, "launches", "segment"),
            row["status"] + ("" if row["fits"] else "; does not fit"),
        ]
        yield "| " + " | ".join(cells) + " |"
