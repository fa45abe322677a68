"""What gets installed: every package, under the project's own name only."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_listed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    homes = {"swapkv_jax": "swapkv_jax", "kernels": "swapkv_jax.kernels", "plans": "swapkv_jax.plans"}
    found = {
        ".".join([homes[top], *path.parent.relative_to(ROOT / top).parts])
        for top in homes
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert found == set(setuptools["packages"])


def test_kernels_and_plans_are_ours_alone(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u\n"
        "assert u.find_spec('swapkv_jax.kernels') and u.find_spec('swapkv_jax.plans')\n"
        "assert u.find_spec('kernels') is None and u.find_spec('plans') is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_top_level_is_as_agreed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    top = {Path(line).parts[0] for line in listed.stdout.splitlines()}
    agreed = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "Makefile",
        "swapkv_jax",
        "docs",
        "kernels",
        "plans",
        "tests",
        "tools",
    }
    assert {name for name in top if not name.startswith(".")} == agreed
