"""The adapter as a record: slices, shares of variance, and what its directory may and may not hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapkv_jax.adapter import Adapter, NoAdapterError, adapter_directory, digest_text
from swapkv_jax.errors import ModelError, UsageError

LAYERS, SIZE, RANK = 3, 12, 8
FINGERPRINT = "0123456789abcdef" * 2


def make_adapter(seed: int = 0, rank: int = RANK, place_tokens: int = 4) -> Adapter:
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.standard_normal((LAYERS, SIZE, SIZE)))[0][:, :, :rank]
    return Adapter(
        vectors=vectors.astype(np.float32),
        spectrum=-np.sort(-(rng.random((LAYERS, SIZE)) ** 4)),
        fingerprint=FINGERPRINT,
        text_digest=digest_text("a text"),
        tokens=99 + seed,
        place_tokens=place_tokens,
    )


def same(a: Adapter, b: Adapter) -> bool:
    arrays = np.array_equal(a.vectors, b.vectors) and np.array_equal(a.spectrum, b.spectrum)
    dtypes = (a.vectors.dtype, a.spectrum.dtype) == (b.vectors.dtype, b.spectrum.dtype)
    names = ("fingerprint", "text_digest", "tokens", "place_tokens")
    return arrays and dtypes and all(getattr(a, name) == getattr(b, name) for name in names)


@given(st.integers(1, RANK))
def test_slice_keeps_the_first_vectors(rank: int) -> None:
    adapter = make_adapter()
    part = adapter.slice(rank)
    assert part.rank == rank
    assert np.array_equal(part.vectors, adapter.vectors[:, :, :rank])
    assert part.vectors.flags.c_contiguous
    assert np.array_equal(part.variance_kept(rank), adapter.variance_kept(rank))
    assert (part.fingerprint, part.place_tokens) == (adapter.fingerprint, adapter.place_tokens)


@pytest.mark.parametrize("rank", [-1, 0, RANK + 1])
def test_slice_refuses_ranks_that_were_not_saved(rank: int) -> None:
    with pytest.raises(UsageError, match=f"rank {rank} .* largest is {RANK}; .*model allows {SIZE}"):
        make_adapter().slice(rank)


def test_variance_kept() -> None:
    spectrum = np.array([[8.0, 1.0, 1.0], [4.0, 4.0, 0.0]])
    vectors = np.stack([np.eye(3, 2, dtype=np.float32)] * 2)
    adapter = Adapter(vectors=vectors, spectrum=spectrum, fingerprint="f", text_digest="d", tokens=1)
    np.testing.assert_allclose(adapter.variance_kept(1), [0.8, 0.5])
    np.testing.assert_allclose(adapter.variance_kept(3), [1.0, 1.0])  # more than the vectors that are there
    for rank in (0, 4):
        with pytest.raises(UsageError, match="use 1 to 3"):
            adapter.variance_kept(rank)


@pytest.mark.parametrize("rank", [1, RANK, SIZE])
def test_round_trip(tmp_path: Path, rank: int) -> None:
    adapter = make_adapter(rank=rank)
    adapter.save(tmp_path / "deep" / "er")
    assert same(Adapter.load(tmp_path / "deep" / "er", FINGERPRINT), adapter)


def test_a_record_that_does_not_name_its_means_is_of_tokens(tmp_path: Path) -> None:
    make_adapter(place_tokens=1).save(tmp_path)
    record = json.loads((tmp_path / "adapter.json").read_text())
    assert record.pop("place_tokens") == 1
    (tmp_path / "adapter.json").write_text(json.dumps(record))
    assert same(Adapter.load(tmp_path, FINGERPRINT), make_adapter(place_tokens=1))


def test_a_slice_is_saved_as_a_slice(tmp_path: Path) -> None:
    adapter = make_adapter().slice(3)
    adapter.save(tmp_path)
    assert same(Adapter.load(tmp_path, FINGERPRINT), adapter)


def test_saving_again_replaces_and_sweeps(tmp_path: Path) -> None:
    make_adapter(0).save(tmp_path)
    (tmp_path / "arrays-0.orbax-checkpoint-tmp-1").mkdir()  # as a killed process would leave it
    make_adapter(1).save(tmp_path)
    assert same(Adapter.load(tmp_path, FINGERPRINT), make_adapter(1))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_save_that_dies_leaves_the_old_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_adapter(0).save(tmp_path)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", die)
    with pytest.raises(KeyboardInterrupt):
        make_adapter(1).save(tmp_path)
    monkeypatch.undo()
    assert same(Adapter.load(tmp_path, FINGERPRINT), make_adapter(0))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_leaves_the_old_adapter(tmp_path: Path) -> None:
    make_adapter(0).save(tmp_path)
    code = (
        "import resource, sys, numpy as np; from pathlib import Path; from swapkv_jax.adapter import Adapter\n"
        "from swapkv_jax.errors import ModelError\n"
        "noise = np.random.default_rng(0).random((2, 128, 128), np.float32)\n"
        "adapter = Adapter(vectors=noise, spectrum=np.ones((2, 128)), fingerprint='f', text_digest='', tokens=1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "try: adapter.save(Path(sys.argv[1]))\n"
        "except ModelError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.startswith(f"{tmp_path}: cannot keep the adapter (")
    assert said.endswith("; use a writable directory with room\n")
    assert said.count("\n") == 1
    assert same(Adapter.load(tmp_path, FINGERPRINT), make_adapter(0))
    assert len(list(tmp_path.iterdir())) == 2


def test_two_processes_saving_and_reading(tmp_path: Path) -> None:
    """Whatever is read is one of the two adapters, whole: the load verifies its checksum."""
    make_adapter(0).save(tmp_path)
    code = (
        "import sys; from pathlib import Path; from test_adapter import make_adapter\n"
        "for i in range(8): make_adapter(1 + i % 2).save(Path(sys.argv[1]))\n"
        "print('saved')"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE) as writer:
        reads = {0: 0, 1: 0, 2: 0}
        while writer.poll() is None:
            adapter = Adapter.load(tmp_path, FINGERPRINT)
            assert same(adapter, make_adapter(adapter.tokens - 99))
            reads[adapter.tokens - 99] += 1
            make_adapter(1).save(tmp_path)
        assert writer.stdout is not None
        assert writer.stdout.read() == b"saved\n"
    assert sum(reads.values()) > 1


def test_another_models_adapter_is_refused(tmp_path: Path) -> None:
    make_adapter().save(tmp_path)
    with pytest.raises(ModelError, match=rf"{tmp_path}: .*{FINGERPRINT}.* has {'f' * 32}; .*--out"):
        Adapter.load(tmp_path, "f" * 32)


@pytest.mark.parametrize("made", [True, False])
def test_missing(tmp_path: Path, made: bool) -> None:
    place = tmp_path if made else tmp_path / "nowhere"
    with pytest.raises(NoAdapterError, match=rf"{place}: no adapter there; make one"):
        Adapter.load(place, FINGERPRINT)
    assert place.exists() is made


def _edit(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "adapter.json"
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))

    return damage


def _write_record(content: bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / "adapter.json").write_bytes(content)

    return damage


def _largest(directory: Path) -> Path:
    return max((p for p in directory.glob("arrays-*/**/*") if p.is_file()), key=lambda p: p.stat().st_size)


def _flip(directory: Path) -> None:
    path = _largest(directory)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(directory: Path) -> None:
    os.truncate(_largest(directory), _largest(directory).stat().st_size // 2)


def _remove_file(directory: Path) -> None:
    next(directory.glob("arrays-*/_METADATA")).unlink()


def _other_arrays(directory: Path) -> None:
    """A sound checkpoint that is not the one the record was written with."""
    mine = next(directory.glob("arrays-*"))
    make_adapter(5).save(directory / "other")
    shutil.rmtree(mine)
    next((directory / "other").glob("arrays-*")).rename(mine)


DAMAGE = {
    "no arrays": lambda d: shutil.rmtree(next(d.glob("arrays-*"))),
    "truncated arrays": _truncate,
    "flipped bit": _flip,
    "lost file": _remove_file,
    "other arrays": _other_arrays,
    "no checksum": _edit(lambda r: r.pop("checksum")),
    "tokens as text": _edit(lambda r: r.update(tokens="many")),
    "future version": _edit(lambda r: r.update(version=2)),
    "unknown field": _edit(lambda r: r.update(colour="red")),
    "empty record": _write_record(b""),
    "not JSON": _write_record(b"\xff\x00\x12"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_refused(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    make_adapter().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(
        ModelError, match=rf"{tmp_path}: damaged adapter \(.+\); delete the directory"
    ) as caught:
        Adapter.load(tmp_path, FINGERPRINT)
    assert "\n" not in str(caught.value)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ModelError, match=r"cannot keep the adapter \(errno \d+.*; use a writable"):
        make_adapter().save(file / "below")
    with pytest.raises(ModelError, match=r"cannot read the adapter \(errno \d+"):
        Adapter.load(file, FINGERPRINT)


def test_default_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = tmp_path / "swapkv_jax" / "adapters" / FINGERPRINT
    assert [adapter_directory(FINGERPRINT, n) for n in (1, 4)] == [place / "means-of-1", place / "means-of-4"]


def test_module_needs_neither_jax_nor_orbax() -> None:
    code = (
        "import sys, swapkv_jax.adapter; assert not {'jax', 'orbax', 'orbax.checkpoint'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
