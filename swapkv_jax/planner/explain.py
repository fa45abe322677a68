"""A choice, for a person: what was considered, what each would take, and why one was taken."""

from __future__ import annotations

from swapkv_jax.memory_limits import format_bytes
from swapkv_jax.planner.choose import Candidate, Choice


def explain(choice: Choice) -> str:
    """A short table; the plan that was chosen is marked."""
    rows = [("", "plan", "device", "DRAM", "disk", "step", "overhead", "")]
    rows += [_row(candidate, candidate.plan == choice.plan) for candidate in choice.candidates]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"why: {choice.reason}"]
    for row in rows:
        mark, name, *numbers, lacks = row
        cells = [number.rjust(width) for number, width in zip(numbers, widths[2:-1], strict=True)]
        lines.append("  ".join([mark.ljust(widths[0]), name.ljust(widths[1]), *cells, lacks]).rstrip())
    lines.append(f"  (peaks with weights; least times of a step at full context by {choice.rates.source})")
    return "\n".join(lines)


def _row(candidate: Candidate, chosen: bool) -> tuple[str, ...]:
    plan, needs = candidate.plan, candidate.needs
    name = plan.policy if plan.tier is None else f"{plan.policy}, {plan.tier}"
    cost, over = candidate.cost, candidate.overhead
    return (
        " *" if chosen else "  ",
        name,
        format_bytes(needs.device + needs.aliased),
        format_bytes(needs.dram),
        format_bytes(needs.disk),
        "?" if cost is None else f"{cost.step_s * 1e3:,.1f} ms",
        "?" if over is None else f"{over:+.0%}",
        "does not fit" if candidate.short else "",
    )
