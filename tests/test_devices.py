"""The devices that ship with the package: every one readable, plausible, and found however it is spelled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swapkv_jax import UsageError
from swapkv_jax.devices import device_names, device_of_kind, find_device


@pytest.mark.parametrize("name", device_names())
def test_every_description_is_plausible(name: str) -> None:
    device = find_device(name)
    assert device.name == name
    assert 4e9 < device.device_memory.value < 200e9
    assert 10e9 < device.memory_bandwidth.value < 10e12
    assert 1e8 < device.disk.bandwidth < device.memory_bandwidth.value
    assert 0 <= device.disk.read_s < 1e-4
    if device.link is not None and device.dram is not None:
        assert device.disk.bandwidth < device.link.value < device.memory_bandwidth.value
        assert device.dram.value > 16e9
    assert device.shared == (device.link is None) == (device.dram is None)


def test_the_promised_devices_are_there() -> None:
    promised = ["H100", "H200", "A100", "L4", "RTX 4090", "Jetson Orin NVMe", "Jetson Orin eMMC"]
    promised += ["TPU v5e", "TPU v5p", "TPU v6e", "cpu"]
    assert len({find_device(name).name for name in promised}) == len(promised)
    assert find_device("v5e").platform == "tpu"
    assert find_device("orin-emmc").disk.group_tokens == 8


def test_what_jax_calls_them() -> None:
    kinds = {
        "cpu": "cpu",
        "NVIDIA H100 80GB HBM3": "h100",
        "TPU v5 lite": "tpu-v5e",
        "TPU v6 lite": "tpu-v6e",
    }
    for kind, name in kinds.items():
        device = device_of_kind(kind)
        assert device is not None
        assert device.name == name
    assert device_of_kind("Abacus") is None
    every = [kind for name in device_names() for kind in find_device(name).kinds]
    assert len(every) == len(set(every)), "a kind that two descriptions claim"


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    record: dict[str, Any] = {**msgspec.to_builtins(find_device("l4")), "name": "mine"}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(record))
    assert find_device(str(file)).name == "mine"
    for change, words in (
        ({"colour": "red"}, "unknown field `colour`"),
        ({"link": None}, "both given"),
        ({"device_memory": {"value": 0, "source": "me"}}, "positive value and a source"),
        ({"device_memory": {"value": 1, "source": ""}}, "positive value and a source"),
    ):
        file.write_text(json.dumps({**record, **change}))
        with pytest.raises(UsageError, match=words) as caught:
            find_device(str(file))
        assert str(file) in str(caught.value)


@pytest.mark.parametrize("name", ["", "abacus", "100", "tpu", "/nonexistent/device.json"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="h100, h200"):
        find_device(name)


def test_descriptions_need_no_jax() -> None:
    code = "import sys; from swapkv_jax.devices import find_device as f; f('l4'); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
