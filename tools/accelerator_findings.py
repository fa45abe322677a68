"""What a check of the accelerator at hand found, and the table of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table. `passed` is None for what was measured and has no bound; `values` are its numbers."""

    part: str
    what: str
    found: str
    passed: bool | None
    values: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "what": self.what,
            "found": self.found,
            "passed": self.passed,
            **self.values,
        }


def raised(part: str, what: str, error: Exception) -> Finding:
    """A failure that is an exception: on a device that nobody here has seen, what follows still tells something."""
    first = str(error).strip().partition("\n")[0]
    return Finding(part=part, what=what, found=f"{type(error).__name__}: {first}", passed=False)


def table(findings: Sequence[Finding]) -> str:
    """A line each, and the count of what failed last."""
    parts, whats = max(len(f.part) for f in findings), max(len(f.what) for f in findings)
    said = {True: "ok", False: "FAILED", None: ""}
    lines = [f"{f.part:{parts}}  {f.what:{whats}}  {said[f.passed]:6}  {f.found}" for f in findings]
    failed = sum(f.passed is False for f in findings)
    return "\n".join([*lines, f"{sum(f.passed is True for f in findings)} ok, {failed} failed"])
