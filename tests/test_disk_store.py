"""The disk store: round trips, damage, faults, limits, locks. Small files, O_DIRECT where there is one."""

import errno
import os
import stat
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax.errors import TierError, UsageError
from swapkv_jax.tiers import (
    DiskStore,
    SequenceFile,
    Syscalls,
    planned_file_bytes,
    record_stride,
    sequential_read_rate,
)
from swapkv_jax.tiers.header import COPY_BYTES, HEADER_BYTES, Extent

LAYERS, GROUP_TOKENS, PAYLOAD, GROUPS = 3, 4, 1000, 10
LAYOUT: dict[str, Any] = {"layers": LAYERS, "group_tokens": GROUP_TOKENS, "payload_bytes": PAYLOAD}


def open_store(path: Path, *, limit: int | None = None, syscalls: Syscalls | None = None) -> DiskStore:
    return DiskStore(path, limit_bytes=limit, fingerprint="model-1", syscalls=syscalls)


def create(store: DiskStore, name: str = "s", *, groups: int = GROUPS, **options) -> SequenceFile:
    return store.create(name, **LAYOUT, prompt_groups=groups, **options)


def content(layer: int, first: int, count: int, version: int = 0) -> np.ndarray:
    """Payloads that differ by layer, group and version, uint8 [count, PAYLOAD]."""
    seeds = [(layer, group, version) for group in range(first, first + count)]
    rows = [np.random.default_rng(seed).integers(0, 256, PAYLOAD, np.uint8) for seed in seeds]
    return np.stack(rows)


def write(file: SequenceFile, layer: int, first: int, count: int, version: int = 0) -> None:
    records = file.buffer(count)
    records[:, :PAYLOAD] = content(layer, first, count, version)
    file.write(layer, first, records)


def read(file: SequenceFile, layer: int, first: int, count: int) -> np.ndarray:
    out = file.buffer(count)
    file.read(layer, first, count, out)
    return out[:, :PAYLOAD]


def fill(file: SequenceFile) -> SequenceFile:
    for layer in range(LAYERS):
        write(file, layer, 0, file.groups)
    return file


def poke(path: Path, offset: int, data: bytes | None = None) -> None:
    """Overwrite bytes in a file, or flip one bit of the byte at `offset`."""
    with open(path, "r+b") as file:
        file.seek(offset)
        data = data or bytes([file.read(1)[0] ^ 4])
        file.seek(offset)
        file.write(data)


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store") as store:
        yield store


# --- layout and round trips ---


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_written_is_read_back(tmp_path_factory, data):
    """Random writes (growing the file, overwriting, in any order), then random reads across extents."""
    with open_store(tmp_path_factory.mktemp("store")) as store:
        file = create(store, groups=data.draw(st.integers(0, 5)))
        stored: dict[tuple[int, int], int] = {}
        spans = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 900), st.integers(1, 8))
        for version, (layer, first, count) in enumerate(data.draw(st.lists(spans, min_size=1, max_size=8))):
            write(file, layer, first, count, version)
            stored |= {(layer, group): version for group in range(first, first + count)}
        if data.draw(st.booleans()):
            file.sync()
        for (layer, group), version in stored.items():
            assert np.array_equal(read(file, layer, group, 1), content(layer, group, 1, version))
        for layer, group in stored:
            count = next(n for n in range(1, 99) if (layer, group + n) not in stored)
            expected = [content(layer, group + n, 1, stored[layer, group + n]) for n in range(count)]
            assert np.array_equal(read(file, layer, group, count), np.concatenate(expected))


def test_adjacent_groups_are_one_aligned_read(store):
    file = fill(create(store))
    assert file.stride == record_stride(PAYLOAD, store.support.alignment)
    assert file.stride % store.support.alignment == 0
    before = store.counts
    assert np.array_equal(read(file, 1, 0, GROUPS), content(1, 0, GROUPS))
    after = store.counts
    assert after.reads - before.reads == 1
    assert after.bytes_read - before.bytes_read == GROUPS * file.stride
    assert before.writes == LAYERS
    assert before.bytes_written == LAYERS * GROUPS * file.stride
    offsets = [file.runs(layer, 0, GROUPS)[0].file_offset for layer in range(LAYERS)]
    assert offsets == [HEADER_BYTES + layer * GROUPS * file.stride for layer in range(LAYERS)]


def test_a_plan_may_fix_the_alignment(store):
    file = create(store, alignment=4096)
    assert file.stride == 4096
    fill(file)
    assert np.array_equal(read(file, 2, 0, GROUPS), content(2, 0, GROUPS))
    if store.direct:
        store.support = replace(store.support, alignment=4096)
        with pytest.raises(UsageError, match=r"aligned to 512 bytes .* align them to 4096"):
            create(store, "finer", alignment=512)
        assert "finer" not in store


def test_extents_grow_in_long_runs_and_never_past_the_maximum(store):
    file = create(store, groups=4, max_groups=1200)
    for group in range(1200):
        file.reserve(group + 1)
    extents = file.header.extents
    assert extents[0] == Extent(0, 4, HEADER_BYTES)
    assert all(extent.groups * file.stride >= 256 << 10 for extent in extents[1:-1])
    assert file.groups == 1200
    assert len(file.runs(0, 0, 1200)) == len(extents) <= 8
    with pytest.raises(ValueError, match="at most 1200"):
        file.reserve(1201)


def test_offsets_are_where_runs_are(store):
    """Of a file with one extent and of one with several, in any order."""
    file = create(store, max_groups=2000)
    for groups in (GROUPS, GROUPS + 1, 1500):
        file.reserve(groups)
        wanted = np.random.default_rng(groups).permutation(file.groups)[:200].astype(np.int32)
        for layer in range(LAYERS):
            expected = [file.runs(layer, group, 1)[0].file_offset for group in wanted.tolist()]
            offsets = file.offsets(layer, wanted)
            assert offsets.dtype == np.int64
            assert offsets.tolist() == expected
    assert len(file.header.extents) > 2
    assert file.offsets(0, np.array([], np.int32)).tolist() == []
    for group in (-1, file.groups):
        with pytest.raises(TierError, match=r"s\.kv holds groups 0 to .*; prefill sequence 's' again"):
            file.offsets(0, np.array([1, group], np.int32))


def test_a_record_read_once_more_is_raised_if_it_is_damaged_still(store):
    file = fill(create(store))
    out, before = file.buffer(1), store.counts
    file.reread(1, 4, out)
    assert np.array_equal(out[:, :PAYLOAD], content(1, 4, 1))
    assert store.counts.retries - before.retries == 1
    poke(file.path, file.runs(1, 4, 1)[0].file_offset + 17)
    with pytest.raises(TierError, match=r"layer 1, group 4 in .*s\.kv is damaged .*delete the file"):
        file.reread(1, 4, out)


def test_a_partly_filled_last_group_says_so(store):
    file = create(store)
    file.write(0, 0, file.buffer(3), last_valid=1)
    assert file.read(0, 0, 3, file.buffer(3)).tolist() == [GROUP_TOKENS, GROUP_TOKENS, 1]


def test_offsets_past_4_gib(tmp_path):
    """A sparse file: no room is reserved, and only the records written take any."""

    class Sparse(Syscalls):
        def reserve(self, descriptor, offset, length):
            self.truncate(descriptor, offset + length)

    with open_store(tmp_path, syscalls=Sparse()) as store:
        groups = (5 << 30) // record_stride(PAYLOAD, store.support.alignment)
        file = create(store, groups=groups)
        assert file.runs(1, groups - 1, 1)[0].file_offset > 1 << 33
        for layer, group in [(0, 0), (1, groups - 1), (2, groups // 2)]:
            write(file, layer, group, 1)
        for layer, group in [(0, 0), (1, groups - 1), (2, groups // 2)]:
            assert np.array_equal(read(file, layer, group, 1), content(layer, group, 1))
        assert store.bytes_used < 1 << 20


def test_named_sequences_survive_and_ephemeral_ones_go(tmp_path):
    with open_store(tmp_path) as store:
        fill(create(store, "a/named one", ephemeral=False, meta={"tokens": 40})).sync()
        write(store.open("a/named one"), 2, GROUPS, 3)
        create(store, "scratch")
    with open_store(tmp_path) as store:
        assert store.past == ("a/named one",)
        assert "scratch" not in store
        file = store.open("a/named one", **LAYOUT)
        assert store.active == ("a/named one",)
        assert store.open("a/named one") is file
        assert file.header.meta == {"tokens": 40}
        for layer in range(LAYERS):
            assert np.array_equal(read(file, layer, 0, GROUPS), content(layer, 0, GROUPS))
        assert np.array_equal(read(file, 2, GROUPS, 3), content(2, GROUPS, 3))
        store.delete("a/named one")
        assert store.bytes_used == 0


def test_private_modes(tmp_path):
    with open_store(tmp_path / "deep" / "store") as store:
        path = create(store).path
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- damage ---


@pytest.mark.parametrize("place", ["payload", "padding", "layer", "valid", "checksum"])
def test_a_flipped_bit_is_detected(store, place):
    file = fill(create(store))
    within = {
        "payload": 17,
        "padding": PAYLOAD + 1,
        "layer": file.stride - 32,
        "valid": file.stride - 16,
        "checksum": file.stride - 1,
    }
    poke(file.path, file.runs(1, 4, 1)[0].file_offset + within[place])
    with pytest.raises(TierError, match=r"layer 1, group 4 in .*s\.kv is damaged .*delete the file"):
        read(file, 1, 0, GROUPS)
    assert np.array_equal(read(file, 1, 5, 3), content(1, 5, 3))
    assert store.counts.retries == 1


def test_swapped_foreign_and_unwritten_records_are_detected(store):
    file, other = fill(create(store)), fill(create(store, "other"))
    raw = file.path.read_bytes()

    def place(layer: int, group: int) -> slice:
        offset = file.runs(layer, group, 1)[0].file_offset
        return slice(offset, offset + file.stride)

    for source, target in [((0, 3), (0, 5)), ((0, 5), (0, 3)), ((1, 6), (2, 6))]:
        poke(file.path, place(*target).start, raw[place(*source)])
    poke(file.path, place(1, 1).start, other.path.read_bytes()[place(1, 1)])
    for layer, group in [(0, 3), (0, 5), (2, 6), (1, 1)]:
        with pytest.raises(TierError, match=f"layer {layer}, group {group} "):
            read(file, layer, group, 1)
    file.reserve(GROUPS + 1)
    with pytest.raises(TierError, match="never written"):
        read(file, 0, GROUPS, 1)
    with pytest.raises(TierError, match="holds groups 0 to"):
        read(file, 0, file.groups, 1)


def named(tmp_path: Path) -> Path:
    with open_store(tmp_path) as store:
        file = fill(create(store, ephemeral=False))
        file.sync()
        return file.path


@pytest.mark.parametrize("first", [0, 1])
def test_one_damaged_header_copy_is_survived_and_two_are_not(tmp_path, first):
    path = named(tmp_path)
    poke(path, first * COPY_BYTES + 40)
    with open_store(tmp_path) as store:
        assert np.array_equal(read(store.open("s"), 2, 0, GROUPS), content(2, 0, GROUPS))
    poke(path, (1 - first) * COPY_BYTES + 40)
    with open_store(tmp_path) as store:
        with pytest.raises(TierError, match="damaged header; delete it"):
            store.open("s")
        assert store.past == ("s",), "a session that might be rescued is not swept"


def test_a_torn_header_write_leaves_the_file_as_it_was(tmp_path):
    with open_store(tmp_path) as store:
        file = fill(create(store, ephemeral=False))
        file.sync()
        file.reserve(GROUPS + 1)
        newest = file.header.generation
        path = file.path
    poke(path, newest % 2 * COPY_BYTES + 100)
    with open_store(tmp_path) as store:
        file = store.open("s")
        assert file.groups == GROUPS
        assert np.array_equal(read(file, 0, 0, GROUPS), content(0, 0, GROUPS))
        write(file, 0, GROUPS, 2)
        assert np.array_equal(read(file, 0, GROUPS, 2), content(0, GROUPS, 2))


def test_a_truncated_or_foreign_file_is_refused(tmp_path):
    path = named(tmp_path)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    (tmp_path / "text.kv").write_text("not a sequence file at all" * 10)
    (tmp_path / "later.kv").write_bytes(path.read_bytes())
    for copy in range(2):
        poke(tmp_path / "later.kv", copy * COPY_BYTES + 8, (9).to_bytes(4, "little"))
    os.truncate(tmp_path / "later.kv", size)
    with open_store(tmp_path) as store:
        for name, message in [
            ("s", "truncated: .* 1 short"),
            ("text", "not a swapkv_jax sequence file"),
            ("later", "format version 9, this version reads 1"),
            ("missing", "errno 2, .* prefill its sequence again"),
        ]:
            with pytest.raises(TierError, match=message):
                store.open(name)
        assert store.active == ()
    assert path.stat().st_size == size - 1


def test_another_model_or_layout_is_refused(tmp_path):
    path = named(tmp_path)
    with DiskStore(tmp_path, limit_bytes=None, fingerprint="model-2") as store:
        with pytest.raises(TierError, match=r"fingerprint 'model-1', not 'model-2'"):
            store.open("s")
    os.rename(path, path.with_name("t.kv"))
    with open_store(tmp_path) as store:
        with pytest.raises(TierError, match="sequence 's', not 't'"):
            store.open("t")
        os.rename(path.with_name("t.kv"), path)
        with pytest.raises(TierError, match="payload_bytes 1000, not 2000"):
            store.open("s", payload_bytes=2000)
        assert store.open("s").groups == GROUPS
        with pytest.raises(TierError, match="layers 3, not 4"):
            store.open("s", layers=4)


# --- faults ---


class Faulty(Syscalls):
    """Plays back faults, one per call: an error to raise, or a byte count to cut a transfer to."""

    def __init__(self) -> None:
        self.read_faults: list[int | OSError] = []
        self.write_faults: list[int | OSError] = []
        self.reserve_faults: list[OSError] = []

    def _cut(self, faults: list, buffer: np.ndarray) -> np.ndarray:
        fault = faults.pop(0) if faults else buffer.size
        if isinstance(fault, OSError):
            raise fault
        return buffer[:fault]

    def read_at(self, descriptor, buffer, offset):
        cut = self._cut(self.read_faults, buffer)
        return super().read_at(descriptor, cut, offset) if cut.size else 0

    def write_at(self, descriptor, buffer, offset):
        return super().write_at(descriptor, self._cut(self.write_faults, buffer), offset)

    def reserve(self, descriptor, offset, length):
        if self.reserve_faults:
            super().reserve(descriptor, offset, 4096)  # a filesystem may have taken part of it
            raise self.reserve_faults.pop(0)
        super().reserve(descriptor, offset, length)


def fault(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def test_short_transfers_interruptions_and_passing_errors_are_overcome(tmp_path):
    faulty = Faulty()
    with open_store(tmp_path, syscalls=faulty) as store:
        file = create(store)
        step = store.support.alignment
        faulty.write_faults = [step, fault(errno.EINTR), 3 * step, fault(errno.EIO)]
        write(file, 0, 0, GROUPS)
        faulty.read_faults = [fault(errno.EINTR), 2 * step, fault(errno.EIO), fault(errno.EAGAIN), step]
        assert np.array_equal(read(file, 0, 0, GROUPS), content(0, 0, GROUPS))
        assert store.counts.retries == 3


def test_an_unaligned_short_read_continues_from_an_aligned_place(tmp_path):
    class Unaligned(Syscalls):
        calls = 0

        def read_at(self, descriptor, buffer, offset):
            self.calls += 1
            count = super().read_at(descriptor, buffer, offset)
            if self.calls > 1 or count < 5000:
                return count
            buffer[4999:] = 0
            return 4999

    with open_store(tmp_path) as store:
        fill(create(store, ephemeral=False))
    syscalls = Unaligned()
    with open_store(tmp_path, syscalls=syscalls) as store:
        file = store.open("s")
        syscalls.calls = 0
        assert np.array_equal(read(file, 0, 0, GROUPS), content(0, 0, GROUPS))
        assert syscalls.calls == 2


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_lasting_errors_name_path_and_errno(tmp_path, code):
    faulty = Faulty()
    with open_store(tmp_path, syscalls=faulty) as store:
        file = fill(create(store))
        faulty.write_faults = [fault(code)] * 9
        with pytest.raises(TierError, match=rf"cannot write .*s\.kv: errno {code}, "):
            write(file, 0, 0, 2)
        attempts = 9 - len(faulty.write_faults)
        assert attempts == (1 if code == errno.ENOSPC else 3)
        faulty.write_faults = []
        faulty.read_faults = [fault(code)] * 9
        with pytest.raises(TierError, match=rf"cannot read .*s\.kv: errno {code}, "):
            read(file, 0, 0, 2)
        faulty.read_faults = [0] * 9
        with pytest.raises(TierError, match="the file ends early"):
            read(file, 0, 0, 2)


def test_a_wrong_read_is_repeated_once(tmp_path):
    class Corrupting(Syscalls):
        left = 0

        def read_at(self, descriptor, buffer, offset):
            count = super().read_at(descriptor, buffer, offset)
            if self.left:
                self.left -= 1
                buffer[100] ^= 1
            return count

    syscalls = Corrupting()
    with open_store(tmp_path, syscalls=syscalls) as store:
        file = fill(create(store))
        syscalls.left = 1
        assert np.array_equal(read(file, 0, 0, GROUPS), content(0, 0, GROUPS))
        assert store.counts.retries == 1
        syscalls.left = 2
        with pytest.raises(TierError, match="layer 0, group 0 "):
            read(file, 0, 0, GROUPS)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_leaves_everything_as_it_was(tmp_path, code):
    faulty = Faulty()
    with open_store(tmp_path, syscalls=faulty) as store:
        faulty.reserve_faults = [fault(code)]
        with pytest.raises(TierError, match=rf"cannot reserve .* in .*s\.kv: errno {code}, "):
            create(store)
        assert list(tmp_path.iterdir()) == []
        assert store.active == ()
        file = fill(create(store))
        before = (file.header, file.path.stat().st_size, store.bytes_used)
        faulty.reserve_faults = [fault(code), fault(code)]  # for an extent with headroom, and without
        with pytest.raises(TierError, match="cannot reserve"):
            write(file, 0, GROUPS, 1)
        assert (file.header, file.path.stat().st_size, store.bytes_used) == before
        write(file, 0, GROUPS, 1)
        assert np.array_equal(read(file, 0, 0, GROUPS + 1), content(0, 0, GROUPS + 1))


def test_a_failed_header_write_leaves_no_extent(tmp_path):
    faulty = Faulty()
    with open_store(tmp_path, syscalls=faulty) as store:
        file = fill(create(store))
        faulty.write_faults = [fault(errno.EIO)] * 6
        with pytest.raises(TierError, match="errno 5"):
            file.reserve(GROUPS + 1)
        assert file.groups == GROUPS
        assert file.path.stat().st_size == file.header.end
        faulty.write_faults = [fault(errno.EIO)] * 3
        with pytest.raises(TierError, match="errno 5"):
            create(store, "t")
        assert "t" not in store


def test_a_real_file_size_limit(tmp_path):
    script = f"""
    import resource
    from swapkv_jax.errors import TierError
    from swapkv_jax.tiers import DiskStore
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    store = DiskStore({str(tmp_path)!r}, limit_bytes=None, fingerprint="m")
    try:
        store.create("s", layers=4, group_tokens=4, payload_bytes=1 << 16, prompt_groups=9)
    except TierError as error:
        print(error)
    """
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout
    assert f"errno {errno.EFBIG}, " in output
    assert "raise the file size limit of 1.0 MiB" in output
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def tiny_filesystem(tmp_path):
    mount = tmp_path / "mount"
    mount.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if subprocess.run(options, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs takes privileges")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_really_full_disk(tiny_filesystem):
    with open_store(tiny_filesystem) as store:
        with pytest.raises(TierError, match=rf"errno {errno.ENOSPC}, .* short\); free some space"):
            create(store, groups=1000)
        assert store.bytes_used == 0
        file = fill(create(store, groups=30))
        with pytest.raises(TierError, match=rf"errno {errno.ENOSPC}"):
            write(file, 0, 30, 300)
        assert np.array_equal(read(file, 2, 0, 30), content(2, 0, 30))


def test_an_unusable_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=rf"file/store: errno {errno.ENOTDIR}, .*--store-dir"):
        open_store(tmp_path / "file" / "store")

    class ReadOnly(Syscalls):
        def open(self, path, flags, mode=0o600):
            if flags & os.O_CREAT:
                raise fault(errno.EROFS)
            return super().open(path, flags, mode)

    with pytest.raises(UsageError, match=rf"cannot write in .*: errno {errno.EROFS}, .*--store-dir"):
        open_store(tmp_path / "store", syscalls=ReadOnly())


def test_without_o_direct_it_is_buffered_and_says_so(tmp_path):
    dropped: list[int] = []

    class NoDirect(Syscalls):
        def open(self, path, flags, mode=0o600):
            if flags & os.O_DIRECT:
                os.close(super().open(path, flags & ~os.O_DIRECT, mode))  # as Linux: created, then refused
                raise fault(errno.EINVAL)
            return super().open(path, flags, mode)

        def drop_cache(self, descriptor, offset, length):
            dropped.append(length)
            super().drop_cache(descriptor, offset, length)

    with open_store(tmp_path, syscalls=NoDirect()) as store:
        assert not store.direct
        assert store.support.note is not None
        assert "refuses O_DIRECT" in store.support.note
        file = fill(create(store))
        assert not file.direct
        assert np.array_equal(read(file, 0, 0, GROUPS), content(0, 0, GROUPS))
        assert dropped == [GROUPS * file.stride]
        file.sync()
        assert dropped[1] == 0  # all of it
    assert list(tmp_path.iterdir()) == []


def test_a_file_for_smaller_sectors_is_read_buffered(tmp_path):
    named(tmp_path)
    with open_store(tmp_path) as store:
        if not store.direct or store.support.alignment == 4096:
            pytest.skip("needs O_DIRECT on 512-byte sectors")
        store.support = replace(store.support, alignment=4096)
        file = store.open("s")
        assert not file.direct
        assert np.array_equal(read(file, 1, 3, 4), content(1, 3, 4))


def test_buffers_that_cannot_work_are_refused(store):
    file = create(store)
    good = file.buffer(4)
    read_only = file.buffer(4)
    read_only.flags.writeable = False
    unaligned = file.buffer(5).reshape(-1)[1 : 1 + 4 * file.stride].reshape(4, file.stride)
    for bad in (good.view(np.int8), good[:, :-512], good[::2], read_only, unaligned, good[0], good[:0]):
        with pytest.raises(ValueError, match="record"):
            file.write(0, 0, bad)
    with pytest.raises(ValueError, match="4 records for 3 groups"):
        file.read(0, 0, 3, good)
    with pytest.raises(IndexError, match="layer 3 of 3"):
        file.write(LAYERS, 0, good)
    assert store.counts.writes == 0


# --- limits, eviction, locks ---


def test_the_limit_evicts_past_sequences_oldest_first_and_never_active_ones(tmp_path):
    with open_store(tmp_path) as store:
        store.limit_bytes = 3 * planned_file_bytes(LAYERS, GROUPS, PAYLOAD, store.support.alignment)
        for name in "abc":
            fill(create(store, name, ephemeral=name == "a"))
        with pytest.raises(
            TierError, match=r"is full: needs .* short even without its 0 past .*--disk-space"
        ):
            create(store, "d")
        for name in "bac":
            store.finish(name)
        store.open("b")
        create(store, "d")  # a is now the oldest past one
        assert store.active == ("b", "d")
        assert store.past == ("c",)
        with pytest.raises(TierError, match="is full"):
            create(store, "e", groups=8 * GROUPS)
        assert store.past == ("c",), "nothing is evicted in vain"
        write(store.open("b"), 0, GROUPS, 1)
        assert store.open("b").groups == GROUPS + 1, "there is no room for more than is needed"
        assert store.bytes_used <= store.limit_bytes


def test_the_order_of_eviction_outlives_the_process(tmp_path):
    with open_store(tmp_path) as store:
        for name in "abc":
            create(store, name, ephemeral=False)
        for name in "bca":
            store.finish(name)
            time.sleep(0.01)  # further apart than the ticks that file times are kept in
    with open_store(tmp_path) as store:
        assert store.past == ("b", "c", "a")


def test_the_limit_counts_real_bytes_and_leftovers(tmp_path):
    (tmp_path / "someone's file").write_bytes(b"x" * 300_000)
    with open_store(tmp_path) as store:
        assert 300_000 <= store.bytes_used <= 310_000
        planned = planned_file_bytes(LAYERS, GROUPS, PAYLOAD, store.support.alignment)
        store.limit_bytes = store.bytes_used + planned - 1
        with pytest.raises(TierError, match="1 bytes short"):
            create(store)
        store.limit_bytes += 1
        fill(create(store)).sync()
        assert store.bytes_used <= store.limit_bytes


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["create", "finish", "open", "grow", "delete"]),
            st.sampled_from("abcd"),
            st.integers(1, 60),
            st.booleans(),
        ),
        max_size=25,
    )
)
def test_any_history_stays_under_the_limit_and_keeps_active_sequences(tmp_path_factory, steps):
    with open_store(tmp_path_factory.mktemp("store"), limit=800_000) as store:
        active: dict[str, int] = {}
        for action, name, groups, ephemeral in steps:
            stored = name in store
            if action == "create" and not stored:
                try:
                    write(create(store, name, groups=groups, ephemeral=ephemeral), 0, 0, 1)
                    active[name] = 1
                except TierError:
                    assert name not in store
            elif action == "grow" and name in active:
                try:
                    write(store.open(name), 0, 0, groups)
                    active[name] = max(groups, active[name])
                except TierError:
                    assert "is full" in str(sys.exc_info()[1])
            elif action == "finish" and name in active:
                store.finish(name)
                del active[name]
            elif action == "open" and stored:
                store.open(name)
                active.setdefault(name, 1)
            elif action == "delete" and stored:
                store.delete(name)
                active.pop(name, None)
            assert set(store.active) == set(active)
            assert store.bytes_used <= 800_000
            for other, count in active.items():
                assert np.array_equal(read(store.open(other), 0, 0, count), content(0, 0, count))


def test_a_killed_process_leaves_only_named_sequences(tmp_path):
    script = f"""
    import os, signal
    from swapkv_jax.tiers import DiskStore
    store = DiskStore({str(tmp_path)!r}, limit_bytes=None, fingerprint="model-1")
    for name in ("named", "scratch"):
        store.create(name, **{LAYOUT!r}, prompt_groups=50, ephemeral=name == "scratch")
    os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False)
    (tmp_path / "half.kv").touch()
    assert (tmp_path / "scratch.kv").exists()
    scratch = (tmp_path / "scratch.kv").stat().st_blocks * 512
    with open_store(tmp_path) as store:
        assert store.reclaimed_bytes == scratch > 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["named.kv"]
        assert store.open("named").groups == 50


def test_files_in_use_elsewhere_are_left_alone(tmp_path):
    with open_store(tmp_path) as first, open_store(tmp_path) as second:
        # Locks belong to open files, so two stores in a process exclude each other as two processes do.
        assert second.reclaimed_bytes == 0
        fill(create(first, "scratch"))
        fill(create(first, "named", ephemeral=False))
        for attempt in (second.open, second.delete):
            with pytest.raises(TierError, match="in use by another process"):
                attempt("named")
        with pytest.raises(TierError, match="already stored"):
            create(second, "named")
        second.limit_bytes = second.bytes_used + (32 << 10)
        with pytest.raises(TierError, match="0 past sequences"):
            create(second, "other")
        first.finish("named")
        create(second, "other")
        assert "named" not in first
        assert np.array_equal(read(first.open("scratch"), 2, 1, 5), content(2, 1, 5))
        with open_store(tmp_path) as third:
            assert third.reclaimed_bytes == 0


def test_unlinked_files_can_be_opened_by_nobody_and_leave_nothing(tmp_path):
    with DiskStore(tmp_path, limit_bytes=900_000, fingerprint="model-1", unlinked=True) as store:
        file = fill(create(store, groups=100))
        assert list(tmp_path.iterdir()) == []
        assert store.bytes_used > 3 * 100 * PAYLOAD
        assert np.array_equal(read(file, 1, 0, 100), content(1, 0, 100))
        write(file, 2, 100, 5)
        assert np.array_equal(read(file, 2, 100, 5), content(2, 100, 5))
        with pytest.raises(TierError, match="already stored"):
            create(store)
        with pytest.raises(TierError, match="is full"):
            create(store, "t", groups=300)
        create(store, "u", groups=1)
        assert store.open("s") is file
        store.finish("s")
        with pytest.raises(TierError, match="errno 2"):
            store.open("s")
        store.delete("u")
        assert store.bytes_used == 0
        create(store, "t", groups=150)


def test_names(store):
    for name in ("", "x" * 198):
        with pytest.raises(UsageError, match="characters"):
            create(store, name)
    for name in ("..", "a/../b", "ü %2F", "x" * 197):
        assert create(store, name).path.parent == store.directory
        assert name in store


def test_closed_is_closed(tmp_path):
    store = open_store(tmp_path)
    file = create(store)
    store.close()
    store.close()
    for attempt in (lambda: read(file, 0, 0, 1), lambda: write(file, 0, 0, 1), file.sync):
        with pytest.raises(TierError, match="closed"):
            attempt()
    with pytest.raises(TierError, match="closed"):
        create(store)


# --- threads, speed ---


def test_many_threads_read_while_one_appends(store):
    file = fill(create(store, groups=60))

    def reader(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            layer, first, count = (int(n) for n in rng.integers([0, 0, 1], [LAYERS, 50, 10]))
            assert np.array_equal(read(file, layer, first, count), content(layer, first, count))

    with ThreadPoolExecutor(5) as pool:
        readers = [pool.submit(reader, seed) for seed in range(4)]
        appended = pool.submit(lambda: [write(file, group % LAYERS, 60 + group, 1) for group in range(60)])
        for future in (*readers, appended):
            future.result()
    for group in range(60):
        assert np.array_equal(
            read(file, group % LAYERS, 60 + group, 1), content(group % LAYERS, 60 + group, 1)
        )
    counts = store.counts
    assert counts.bytes_written == (LAYERS * 60 + 60) * file.stride
    assert counts.reads >= 4 * 40 + 60
    assert counts.retries == 0


def test_sequential_read_rate_is_a_rate(tmp_path):
    path = tmp_path / "plain"
    path.write_bytes(bytes(4 << 20))
    assert sequential_read_rate(path) > 1
    assert sequential_read_rate(path, chunk_bytes=4096, limit_bytes=8192) > 0
    with pytest.raises(ValueError, match="less than one chunk"):
        sequential_read_rate(path, chunk_bytes=8 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("payload", [6144, 98304])
def test_verified_reads_keep_up_with_a_plain_reader(tmp_path, payload):
    """Two layers in flight, as a prefetcher has them: ≥ 80 % of a plain reader taking the same pieces."""
    layers, groups = 30, (8 << 20) // payload
    with open_store(tmp_path) as store, ThreadPoolExecutor(2) as pool:
        file = store.create("s", layers=layers, group_tokens=4, payload_bytes=payload, prompt_groups=groups)
        buffers = [file.buffer(groups) for _ in range(2)]
        for layer in range(layers):
            file.write(layer, 0, buffers[0])
        file.sync()
        piece = buffers[0].nbytes

        def one_thread(index: int) -> None:
            for layer in range(index, layers, 2):
                file.read(layer, 0, groups, buffers[index])

        plain, verified = [], []
        for _ in range(7):
            plain.append(sequential_read_rate(file.path, chunk_bytes=piece // 4096 * 4096))
            start = time.perf_counter()
            list(pool.map(one_thread, range(2)))
            verified.append(layers * piece / (time.perf_counter() - start) / 1e6)
    # A shared disk varies by half from one second to the next: what the store can do is its best round.
    assert max(verified) >= 0.8 * np.median(plain)
