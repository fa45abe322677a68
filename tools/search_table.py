"""What `search_policies.py` shows of a search."""

from __future__ import annotations

from settings_file import Outcome, Point, SettingsFile, Trial


def table(result: SettingsFile) -> str:
    """Markdown: every setting that was tried, and notes."""
    lines = [
        f"{result.model}, {result.dtype}, {result.context} tokens, batch {result.batch}, KV memory {result.memory}, "
        f"{result.rows} x {result.tokens} tokens compared, disk {result.storage_profile or 'as it is'}",
        "",
        "| policy | G | r | M | C | other choices | memory | KL | top-1 | ms/step | MB/step | best |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|---|",
    ]
    notes = []
    for policy, outcome in result.policies.items():
        notes += [f"{policy}: {note}" for note in outcome.notes]
        lines += [_row(policy, point, outcome) for point in outcome.points]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def _row(policy: str, point: Point, outcome: Outcome) -> str:
    trial, choices = point.trial, dict(point.choices)
    sizes = [str(choices.pop(name, "")) for name in ("group_tokens", "rank")]
    del choices["selected_groups"]
    choices["refresh"] = max(choices["refresh"], default=1)
    others = ", ".join(f"{name.removesuffix('_groups')} {value}" for name, value in choices.items())
    goals = ", ".join(goal for goal, best in outcome.best.items() if best == point)
    cells = [
        policy, *sizes, str(trial.selected_groups), str(trial.reuse_slots), others, f"{trial.memory:.4f}",
        f"{trial.kl:.4f}", f"{trial.top1:.1%}", milliseconds(trial), f"{trial.read_bytes / 1e6:.2f}", goals,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def milliseconds(trial: Trial) -> str:
    return "–" if trial.seconds is None else f"{trial.seconds * 1e3:.1f}"
