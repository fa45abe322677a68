"""Asynchronous reads: what arrives, what is refused, and that nothing stays in flight whatever happens between."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapkv_jax.tiers import Syscalls, aligned_buffer
from swapkv_jax.tiers.direct_io import probe_direct
from swapkv_jax.tiers.kernel_reads import KernelReads

PAGE = 4096
PAGES = 16  # per file
SIZE = 8
GUARD = 0xA5


@pytest.fixture(scope="module", autouse=True)
def _available() -> None:
    try:
        KernelReads(1).close()
    except OSError as error:
        pytest.skip(f"no asynchronous reads here: {error}")


@pytest.fixture
def kernel() -> Iterator[KernelReads]:
    kernel = KernelReads(SIZE)
    yield kernel
    kernel.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[int, np.ndarray]]]:
    """Descriptors, direct, and contents."""
    directory = tmp_path_factory.mktemp("files")
    if not probe_direct(directory, Syscalls()).direct:
        pytest.skip("needs O_DIRECT")
    files = []
    for name in range(3):
        content = np.random.default_rng(name).integers(0, 256, PAGES * PAGE, np.uint8)
        path = directory / str(name)
        path.write_bytes(content.tobytes())
        files.append((os.open(path, os.O_RDONLY | os.O_DIRECT), content))
    yield files
    for descriptor, _ in files:
        os.close(descriptor)


def submit(kernel: KernelReads, out: np.ndarray, reads: list[tuple[int, int, int, int]]) -> None:
    """Reads are (descriptor, place in `out`, bytes, offset)."""
    descriptors, places, nbytes, offsets = np.array(reads, np.int64).reshape(-1, 4).T
    kernel.submit(descriptors, out.ctypes.data + places, nbytes, offsets)


def page_reads(files: list[tuple[int, np.ndarray]], count: int = SIZE) -> list[tuple[int, int, int, int]]:
    """One page each, from all files, back to front."""
    return [(files[i % 3][0], i * PAGE, PAGE, (PAGES - 1 - i) * PAGE) for i in range(count)]


def pages(files: list[tuple[int, np.ndarray]], count: int = SIZE) -> np.ndarray:
    """What `page_reads` should bring."""
    return np.concatenate([files[i % 3][1].reshape(-1, PAGE)[PAGES - 1 - i] for i in range(count)])


def guarded(nbytes: int = SIZE * PAGE) -> np.ndarray:
    out = aligned_buffer(nbytes)
    out[:] = GUARD
    return out


def wrap(kernel: KernelReads, name: str, wrapper: Callable[[Callable[..., int], Any], int]) -> None:
    """`wrapper` is called in place of one system call, with the real one and its arguments."""
    real, number = kernel._call, getattr(kernel, f"_{name}")

    def call(wanted: int, *arguments: Any) -> int:
        if wanted != number:
            return real(wanted, *arguments)
        return wrapper(lambda *given: real(number, *given), arguments)

    kernel._call = call


def assert_works(kernel: KernelReads, files: list[tuple[int, np.ndarray]]) -> None:
    out = guarded()
    submit(kernel, out, page_reads(files))
    assert kernel.collect().tolist() == [PAGE] * SIZE
    np.testing.assert_array_equal(out, pages(files))


# --- what arrives ---


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_read_brings_its_bytes_and_no_others(
    files: list[tuple[int, np.ndarray]], data: st.DataObject
) -> None:
    """Several batches, of reads from any places of several files to places in any order."""
    kernel = KernelReads(SIZE)
    for _ in range(data.draw(st.integers(1, 3))):
        count = data.draw(st.integers(0, SIZE))
        spans = st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, PAGES - 3))
        spans = data.draw(st.lists(spans, min_size=count, max_size=count))
        places = data.draw(st.permutations(range(count)))
        out = guarded((4 * count + 1) * PAGE)  # a page at least between two reads
        expected = out.copy()
        reads = []
        for (file, length, first), place in zip(spans, places, strict=True):
            descriptor, content = files[file]
            at, size = 4 * place * PAGE, length * PAGE
            reads.append((descriptor, at, size, first * PAGE))
            expected[at : at + size] = content[first * PAGE : first * PAGE + size]
        submit(kernel, out, reads)
        assert kernel.collect().tolist() == [size for _, _, size, _ in reads]
        np.testing.assert_array_equal(out, expected)
    kernel.close()


def test_reads_at_the_end_of_a_file_are_short(
    kernel: KernelReads, files: list[tuple[int, np.ndarray]]
) -> None:
    descriptor, content = files[1]
    out = guarded()
    submit(
        kernel,
        out,
        [(descriptor, 0, 3 * PAGE, (PAGES - 2) * PAGE), (descriptor, 4 * PAGE, PAGE, PAGES * PAGE)],
    )
    assert kernel.collect().tolist() == [2 * PAGE, 0]
    np.testing.assert_array_equal(out[: 2 * PAGE], content[-2 * PAGE :])
    assert (out[3 * PAGE :] == GUARD).all()


# --- what is refused ---


@pytest.mark.parametrize("what", ["bytes", "offset"])
def test_an_unaligned_read_is_refused_and_the_others_arrive(
    kernel: KernelReads, files: list[tuple[int, np.ndarray]], what: str
) -> None:
    out, expected = guarded(), pages(files)
    reads = page_reads(files)
    descriptor, place, nbytes, offset = reads[3]
    reads[3] = {
        "bytes": (descriptor, place, nbytes - 1, offset),
        "offset": (descriptor, place, nbytes, offset - 1),
    }[what]
    submit(kernel, out, reads)
    assert kernel.collect().tolist() == [PAGE] * 3 + [-errno.EINVAL] + [PAGE] * 4
    expected[3 * PAGE : 4 * PAGE] = GUARD
    np.testing.assert_array_equal(out, expected)


def test_what_comes_after_a_read_that_cannot_begin_is_refused_with_it(
    kernel: KernelReads, files: list[tuple[int, np.ndarray]]
) -> None:
    out, reads = guarded(), page_reads(files)
    reads[5] = (1 << 20, *reads[5][1:])
    submit(kernel, out, reads)
    assert kernel.collect().tolist() == [PAGE] * 5 + [-errno.EBADF] * 3
    np.testing.assert_array_equal(out[: 5 * PAGE], pages(files, 5))
    assert (out[5 * PAGE :] == GUARD).all()
    assert_works(kernel, files)


@pytest.mark.parametrize("taken", [1, 3])
def test_a_batch_may_be_taken_in_parts(
    kernel: KernelReads, files: list[tuple[int, np.ndarray]], taken: int
) -> None:
    calls = []

    def few(real: Callable[..., int], arguments: Any) -> int:
        context, count, start = arguments
        calls.append(count.value)
        return real(context, ctypes.c_long(min(taken, count.value)), start)

    wrap(kernel, "submit", few)
    assert_works(kernel, files)
    assert calls == list(range(SIZE, 0, -taken))


def test_no_room_for_the_rest_of_a_batch(kernel: KernelReads, files: list[tuple[int, np.ndarray]]) -> None:
    left = [3]

    def few(real: Callable[..., int], arguments: Any) -> int:
        context, _, start = arguments
        if not left:
            ctypes.set_errno(errno.EAGAIN)
            return -1
        return real(context, ctypes.c_long(left.pop()), start)

    wrap(kernel, "submit", few)
    out = guarded()
    submit(kernel, out, page_reads(files))
    assert kernel.collect().tolist() == [PAGE] * 3 + [-errno.EAGAIN] * 5
    np.testing.assert_array_equal(out[: 3 * PAGE], pages(files, 3))
    assert (out[3 * PAGE :] == GUARD).all()


def test_batches_that_do_not_fit(kernel: KernelReads, files: list[tuple[int, np.ndarray]]) -> None:
    out = guarded((SIZE + 1) * PAGE)
    with pytest.raises(ValueError, match="broadcast"):
        submit(kernel, out, page_reads(files, SIZE + 1))
    submit(kernel, out, page_reads(files, 1))
    with pytest.raises(AssertionError, match="has not been collected"):
        submit(kernel, out, page_reads(files, 1))
    assert kernel.collect().tolist() == [PAGE]
    assert kernel.collect().tolist() == []
    assert_works(kernel, files)


@pytest.mark.parametrize(("size", "code"), [(0, errno.EINVAL), (None, errno.EAGAIN)])
def test_sizes_that_the_system_does_not_give(size: int | None, code: int) -> None:
    if size is None:
        size = int(Path("/proc/sys/fs/aio-max-nr").read_text()) + 1
        if size > 1 << 20:
            pytest.skip(f"a limit of {size - 1} reads in flight is too high to exceed")
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        KernelReads(size)
    assert caught.value.errno == code


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("Linux", "s390x"), ("Darwin", "x86_64")]
)
def test_systems_without_such_calls(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(OSError, match=f"no asynchronous reads known on {system} {machine}") as caught:
        KernelReads(SIZE)
    assert caught.value.errno == errno.ENOSYS


# --- interruptions ---


def test_a_wait_that_a_signal_ends_goes_on(kernel: KernelReads, files: list[tuple[int, np.ndarray]]) -> None:
    """Also one that a signal ends when only some of the batch has come."""
    script = ["signal", "some", "signal", "signal", "all"]

    def interrupted(real: Callable[..., int], arguments: Any) -> int:
        event = script.pop(0)
        if event == "signal":
            ctypes.set_errno(errno.EINTR)
            return -1
        context, least, most, events, timeout = arguments
        some = ctypes.c_long(3) if event == "some" else most
        return real(context, some if event == "some" else least, some, events, timeout)

    wrap(kernel, "getevents", interrupted)
    out = guarded()
    submit(kernel, out, page_reads(files))
    assert kernel.collect().tolist() == [PAGE] * SIZE
    np.testing.assert_array_equal(out, pages(files))
    assert script == []


@pytest.mark.parametrize("name", ["submit", "getevents"])
@pytest.mark.parametrize("after", [False, True])
def test_an_exception_of_a_signal_handler_loses_count_of_nothing(
    kernel: KernelReads, files: list[tuple[int, np.ndarray]], name: str, after: bool
) -> None:
    """Ctrl-C may raise before or right after a system call, when nobody knows yet what the call did."""
    out, armed = guarded(), [True]

    def interrupted(real: Callable[..., int], arguments: Any) -> int:
        result = real(*arguments) if after or not armed else 0
        if armed:
            armed.clear()
            raise KeyboardInterrupt
        return result

    wrap(kernel, name, interrupted)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - out of either
        submit(kernel, out, page_reads(files))
        kernel.collect()
    kernel.cancel()
    out[:] = GUARD  # from now on it is someone else's
    assert_works(kernel, files)
    assert (out == GUARD).all()


def test_a_failed_wait_is_raised_and_can_be_cancelled(
    kernel: KernelReads, files: list[tuple[int, np.ndarray]]
) -> None:
    codes = [errno.EFAULT]

    def failing(real: Callable[..., int], arguments: Any) -> int:
        if not codes:
            return real(*arguments)
        ctypes.set_errno(codes.pop())
        return -1

    wrap(kernel, "getevents", failing)
    submit(kernel, guarded(), page_reads(files))
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        kernel.collect()
    kernel.cancel()
    assert_works(kernel, files)


# --- the end ---


def test_cancelled_is_forgotten(kernel: KernelReads, files: list[tuple[int, np.ndarray]]) -> None:
    out = guarded()
    kernel.cancel()
    submit(kernel, out, page_reads(files))
    kernel.cancel()
    np.testing.assert_array_equal(out, pages(files))  # it has been waited for
    assert kernel.collect().tolist() == []
    assert_works(kernel, files)


def test_close_waits_for_what_is_in_flight(files: list[tuple[int, np.ndarray]]) -> None:
    for _ in range(5):
        kernel, out = KernelReads(SIZE), guarded()
        submit(kernel, out, page_reads(files))
        kernel.close()
        np.testing.assert_array_equal(out, pages(files))
        kernel.close()
        kernel.cancel()
        submit(kernel, out, page_reads(files, 2))
        assert kernel.collect().tolist() == [-errno.EINVAL] * 2
