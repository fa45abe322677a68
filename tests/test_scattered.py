"""Scattered records: as `SequenceFile.read` brings them one by one, whoever reads, and nothing else touched."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from faulty_disk import Disk, Odd, Once, Short, Transfer, Wrong
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax.errors import TierError
from swapkv_jax.tiers import DiskStore, ScatteredReader, SequenceFile, aligned_buffer
from swapkv_jax.tiers.kernel_reads import KernelReads

LAYERS, PAYLOAD, GROUPS, SIZE = 2, 1000, 24, 40
WAYS = ("kernel", "threads", "buffered")
GUARD = 0xA5


class NoDirect(Disk):
    """As on a filesystem that refuses O_DIRECT."""

    def open(self, path: str | Path, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags, mode)


class Stored(NamedTuple):
    disk: Disk
    store: DiskStore
    files: list[SequenceFile]
    reader: ScatteredReader


def stored(way: str, directory: Path, pool: Executor) -> Stored:
    """Three files with one, three and five extents, every record of them random."""
    if way == "kernel":
        try:
            KernelReads(SIZE).close()
        except OSError as error:
            pytest.skip(f"no asynchronous reads here: {error}")
    disk = NoDirect() if way == "buffered" else Disk(threads=way == "threads")
    store = DiskStore(directory, limit_bytes=None, fingerprint="0" * 32, syscalls=disk)
    if not store.direct and way == "kernel":
        pytest.skip("needs O_DIRECT")
    rng = np.random.default_rng(0)
    with patch("swapkv_jax.tiers.sequence_file._GROWTH_RUN_BYTES", 1):
        for name, sizes in [("a", [GROUPS]), ("b", [20, 1, 3]), ("c", [0, 5, 2, 10, 7])]:
            file = store.create(
                name, layers=LAYERS, group_tokens=4, payload_bytes=PAYLOAD, prompt_groups=sizes[0]
            )
            for end in itertools.accumulate(sizes):
                with patch("swapkv_jax.tiers.sequence_file._GROWTH_SHARE", 1 << 20):
                    file.reserve(end)
            assert len(file.header.extents) == np.count_nonzero(sizes)
            for layer in range(LAYERS):
                records = file.buffer(GROUPS)
                records[...] = rng.integers(0, 256, records.shape, np.uint8)
                file.write(layer, 0, records)
    files = [store.open(name) for name in "abc"]
    return Stored(disk, store, files, ScatteredReader(SIZE, disk, pool))


@pytest.fixture(scope="module", params=WAYS)
def unharmed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    with ThreadPoolExecutor(2) as pool:
        made = stored(request.param, tmp_path_factory.mktemp("store"), pool)
        yield made
        made.reader.close()
        made.store.close()


@pytest.fixture(params=WAYS)
def harmed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stored]:
    with ThreadPoolExecutor(2) as pool:
        made = stored(request.param, tmp_path, pool)
        yield made
        made.reader.close()
        made.store.close()


def guarded(made: Stored, records: int = 3 * GROUPS) -> np.ndarray:
    stride = made.files[0].stride
    out = aligned_buffer(records * stride).reshape(records, stride)
    out[...] = GUARD
    return out


def one_by_one(made: Stored, layer: int, wanted: list[tuple[int, int]]) -> np.ndarray:
    """The records, as plain reads bring them."""
    out = guarded(made, len(wanted))
    for i, (row, group) in enumerate(wanted):
        made.files[row].read(layer, group, 1, out[i : i + 1])
    return out


def start(
    made: Stored, layer: int, wanted: list[tuple[int, int]], out: np.ndarray, places: list[int] | None = None
) -> None:
    rows, groups = np.array(wanted, np.int32).reshape(-1, 2).T
    at = np.arange(len(wanted)) if places is None else np.array(places, np.int64)
    made.reader.start(made.files, layer, rows, groups, out, at)


def assert_reads(made: Stored, layer: int, wanted: list[tuple[int, int]]) -> None:
    out = guarded(made, len(wanted))
    start(made, layer, wanted, out)
    made.reader.finish()
    np.testing.assert_array_equal(out, one_by_one(made, layer, wanted))


EVERYTHING = [(row, group) for row in range(3) for group in range(10)]
SOME = [(0, 3), (0, 4), (0, 9), (1, 0), (2, 4), (2, 5), (2, 6)]


# --- what arrives ---


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_same_as_reading_one_by_one(unharmed: Stored, data: st.DataObject) -> None:
    """Groups of any rows, to places with or without gaps between them: what is adjacent in both is one read."""
    groups = st.tuples(st.integers(0, 2), st.integers(0, GROUPS - 1))
    dense = [(row, first + i) for row, first in data.draw(st.sets(groups, max_size=4)) for i in range(6)]
    wanted = {*data.draw(st.sets(groups, max_size=12)), *((row, g) for row, g in dense if g < GROUPS)}
    wanted = sorted(wanted)[:SIZE]
    gaps = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=len(wanted), max_size=len(wanted))
    places = [i + gap for i, gap in enumerate(itertools.accumulate(data.draw(gaps)))]
    layer = data.draw(st.integers(0, LAYERS - 1))
    out = guarded(unharmed, 2 * SIZE)
    expected = out.copy()
    expected[places] = one_by_one(unharmed, layer, wanted)
    before = unharmed.store.counts
    start(unharmed, layer, wanted, out, places)
    unharmed.reader.finish()
    np.testing.assert_array_equal(out, expected)
    after = unharmed.store.counts
    offsets = [unharmed.files[row].runs(layer, group, 1)[0].file_offset for row, group in wanted]
    joined = sum(
        wanted[i][0] == wanted[i + 1][0]
        and offsets[i + 1] - offsets[i] == out.shape[1]
        and places[i + 1] == places[i] + 1
        for i in range(len(wanted) - 1)
    )
    assert after.reads - before.reads == len(wanted) - joined
    assert after.bytes_read - before.bytes_read == len(wanted) * out.shape[1]
    assert after.retries == before.retries


def test_adjacent_groups_are_one_read_each_extent(unharmed: Stored) -> None:
    before = unharmed.store.counts
    out = guarded(unharmed, GROUPS)
    start(unharmed, 1, [(2, group) for group in range(GROUPS)], out)
    unharmed.reader.finish()
    assert unharmed.store.counts.reads - before.reads == len(unharmed.files[2].header.extents) == 4


def test_what_follows_in_another_file_is_another_read(unharmed: Stored) -> None:
    """Group 4 of the second file lies where group 4 of the first would."""
    before = unharmed.store.counts
    assert unharmed.files[0].runs(0, 4, 1) == unharmed.files[1].runs(0, 4, 1)
    start(unharmed, 0, [(0, 3), (1, 4)], guarded(unharmed))
    unharmed.reader.finish()
    after = unharmed.store.counts
    assert (after.reads - before.reads, after.retries) == (2, before.retries)


def test_nothing_wanted_is_nothing_read(unharmed: Stored) -> None:
    before = unharmed.store.counts
    start(unharmed, 0, [], guarded(unharmed, 1))
    unharmed.reader.finish()
    unharmed.reader.finish()
    assert unharmed.store.counts == before


def test_who_reads(unharmed: Stored) -> None:
    before = unharmed.disk.arrived
    assert_reads(unharmed, 0, SOME)
    by_kernel = unharmed.files[0].direct and not unharmed.disk.threads
    assert (unharmed.disk.arrived > before) == by_kernel
    note = "no asynchronous reads here (Operation not permitted): threads read groups, more slowly"
    assert unharmed.reader.note == (note if unharmed.disk.threads else None)


# --- faults ---


@pytest.mark.parametrize("fault", [Once, Short, Odd, Wrong])
def test_faults_that_pass(harmed: Stored, fault: type[Once]) -> None:
    expected = one_by_one(harmed, 1, EVERYTHING)
    out = guarded(harmed, len(EVERYTHING))
    before = harmed.store.counts.retries
    harmed.disk.reading = fault()
    start(harmed, 1, EVERYTHING, out)
    harmed.reader.finish()
    np.testing.assert_array_equal(out, expected)
    # A short read that gets on is no failure; but what came short of an asynchronous one is read again.
    goes_on = fault is Short and harmed.disk.threads and harmed.files[0].direct  # by whole sectors
    assert (harmed.store.counts.retries > before) == (not goes_on)


def test_a_read_that_keeps_failing_names_its_file(harmed: Stored) -> None:
    descriptor = harmed.files[1].descriptor

    def failing(transfer: Transfer, which: int, buffer: np.ndarray, offset: int) -> int:
        if which == descriptor:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return transfer(which, buffer, offset)

    harmed.disk.reading = failing
    start(harmed, 0, SOME, guarded(harmed))
    with pytest.raises(TierError, match=rf"cannot read .*b\.kv: errno {errno.EIO}, .*; check the disk"):
        harmed.reader.finish()
    harmed.reader.cancel()
    harmed.disk.reading = None
    assert_reads(harmed, 0, SOME)


@pytest.mark.parametrize("damage", ["bit", "swap", "foreign", "end"])
def test_a_damaged_record_is_read_again_and_then_raised(harmed: Stored, damage: str) -> None:
    file, other = harmed.files[2], harmed.files[1]
    at, stride = file.runs(0, 5, 1)[0].file_offset, file.stride
    with file.path.open("r+b") as raw, other.path.open("rb") as foreign:
        if damage == "bit":
            raw.seek(at + 3)
            byte = raw.read(1)[0]
            raw.seek(at + 3)
            raw.write(bytes([byte ^ 1]))
        elif damage == "end":
            raw.truncate(at)
        else:
            source, offset = (
                (raw, file.runs(0, 6, 1)[0].file_offset)
                if damage == "swap"
                else (foreign, other.runs(0, 5, 1)[0].file_offset)
            )
            source.seek(offset)
            record = source.read(stride)
            raw.seek(at)
            raw.write(record)
    before = harmed.store.counts.retries
    start(harmed, 0, SOME, guarded(harmed))
    words = "the file ends early" if damage == "end" else "layer 0, group 5 in .* is damaged or was never"
    with pytest.raises(TierError, match=words) as caught:
        harmed.reader.finish()
    assert str(file.path) in str(caught.value)
    assert harmed.store.counts.retries > before
    harmed.reader.cancel()
    assert_reads(harmed, 0, SOME[:4])


@pytest.mark.parametrize("group", [-1, GROUPS + 1000])
def test_a_group_without_a_place_starts_nothing(harmed: Stored, group: int) -> None:
    out = guarded(harmed)
    with pytest.raises(TierError, match=r"b\.kv holds groups 0 to .*; prefill sequence 'b' again"):
        start(harmed, 0, [(0, 1), (1, group)], out)
    assert (out == GUARD).all()
    assert_reads(harmed, 0, SOME)


# --- cancelled, interrupted, closed ---


def test_cancelled_is_over_and_the_next_batch_works(harmed: Stored) -> None:
    def slow(transfer: Transfer, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        time.sleep(0.01)
        return transfer(descriptor, buffer, offset)

    out = guarded(harmed)
    for end in ("cancel", "close"):
        harmed.disk.reading = slow
        start(harmed, 0, SOME, out)
        getattr(harmed.reader, end)()
        out[...] = GUARD
        harmed.disk.reading = None
        time.sleep(0.03)
        assert (out == GUARD).all()
        harmed.reader.finish()  # of nothing
        if end == "cancel":
            assert_reads(harmed, 1, SOME)
    harmed.reader.close()


def test_one_batch_at_a_time(harmed: Stored) -> None:
    out = guarded(harmed)
    start(harmed, 0, SOME, out)
    with pytest.raises(AssertionError, match="has not been finished"):
        start(harmed, 0, SOME, guarded(harmed))
    harmed.reader.finish()
    np.testing.assert_array_equal(out[: len(SOME)], one_by_one(harmed, 0, SOME))


def test_an_interrupted_wait_for_a_thread_can_be_cancelled(tmp_path: Path) -> None:
    """Ctrl-C while a thread is still reading: `cancel` waits for it, and it has not written after that."""
    go_on, interrupt = threading.Event(), [True]
    waits: list[str] = []

    class Interrupted(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            job = super().submit(fn, *args, **kwargs)
            result, exception = job.result, job.exception

            def raising(timeout: float | None = None) -> Any:
                if interrupt:
                    interrupt.clear()
                    raise KeyboardInterrupt
                return result(timeout)

            def waiting(timeout: float | None = None) -> BaseException | None:
                waits.append("cancel")
                go_on.set()
                return exception(timeout)

            job.result, job.exception = raising, waiting  # type: ignore[method-assign]
            return job

    def held(transfer: Transfer, descriptor: int, buffer: np.ndarray, offset: int) -> int:
        assert go_on.wait(10)
        return transfer(descriptor, buffer, offset)

    with Interrupted(1) as pool:
        made = stored("threads", tmp_path, pool)
        made.disk.reading = held
        out = guarded(made)
        start(made, 0, SOME, out)
        with pytest.raises(KeyboardInterrupt):
            made.reader.finish()
        assert (out == GUARD).all()
        made.reader.cancel()
        assert waits == ["cancel"]
        np.testing.assert_array_equal(out[: len(SOME)], one_by_one(made, 0, SOME))
        assert_reads(made, 1, SOME)
        made.reader.close()
        made.store.close()


@pytest.mark.parametrize("room", [True, False], ids=["room", "no-room"])
def test_an_interrupted_wait_for_the_kernel_can_be_cancelled(tmp_path: Path, room: bool) -> None:
    """If there is then no room to read asynchronously again, threads do, and it says so."""
    with ThreadPoolExecutor(2) as pool:
        made = stored("kernel", tmp_path, pool)
        kernel = made.reader._kernel
        assert kernel is not None
        call, armed = kernel._call, [True]

        def interrupted(number: int, *arguments: Any) -> int:
            result = call(number, *arguments)
            if number == kernel._getevents and armed:
                armed.clear()
                raise KeyboardInterrupt  # what came is lost, and nobody has counted it
            return result

        out = guarded(made)
        start(made, 0, SOME, out)
        with patch.object(kernel, "_call", interrupted):
            with pytest.raises(KeyboardInterrupt):
                made.reader.finish()
        refusal = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        with patch.object(kernel, "_open", kernel._open if room else lambda: _raise(refusal)):
            made.reader.cancel()
        np.testing.assert_array_equal(out[: len(SOME)], one_by_one(made, 0, SOME))
        out[...] = GUARD
        arrived = made.disk.arrived
        assert_reads(made, 1, SOME)
        assert (out == GUARD).all()
        assert (made.disk.arrived > arrived) == room
        assert ("threads read groups" in (made.reader.note or "")) == (not room)
        made.reader.close()
        made.store.close()


def test_a_wait_that_the_system_refuses_ends_in_threads(tmp_path: Path) -> None:
    """No error that a wait is known to end with; what is in flight is waited for all the same."""
    with ThreadPoolExecutor(2) as pool:
        made = stored("kernel", tmp_path, pool)
        kernel = made.reader._kernel
        assert kernel is not None
        out = guarded(made)
        start(made, 0, SOME, out)
        with patch.object(kernel, "_getevents", -1):  # no such call
            made.reader.cancel()
        np.testing.assert_array_equal(out[: len(SOME)], one_by_one(made, 0, SOME))
        assert not kernel._context.value
        assert "Function not implemented" in (made.reader.note or "")
        assert_reads(made, 1, SOME)
        made.reader.close()
        made.store.close()


def _raise(error: OSError) -> None:
    raise error
