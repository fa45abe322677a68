"""One open session: what it holds can be read back, written on, and committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import msgspec
import numpy as np

from swapkv_jax.errors import TierError
from swapkv_jax.sessions.contents import token_ids
from swapkv_jax.sessions.files import SessionFiles, count
from swapkv_jax.sessions.layout import SESSION_GROUP
from swapkv_jax.sessions.places import Places
from swapkv_jax.sessions.reader import LayerReader
from swapkv_jax.tiers import SequenceFile, aligned_buffer
from swapkv_jax.tiers.catalog_rows import SessionContents, SessionEntry

Durability = Literal["none", "close", "group"]

_WRITE_GROUPS = 64


class Session:
    """A conversation's tokens, keys and values. Only one writer, in any process, has it open.

    What was committed is there after a crash; what was not is as if it had never been written. Committed records
    are never overwritten: a session that goes another way from the middle continues in a new file.

    Attributes:
      name: it is found by.
      reused: tokens it started with, its own or another session's, whose K and V need not be computed.
      state: the caller's, as of the last commit.
      bytes_written: to the disk by this object, records with their padding and what went into the catalogue.
    """

    def __init__(
        self,
        files: SessionFiles,
        entry: SessionEntry,
        contents: SessionContents,
        durability: Durability,
        on_close: Callable[[Session], None],
    ) -> None:
        """Takes over a locked session. For `SessionStore.open`.

        Raises:
          TierError: a file cannot be opened, or the contents are damaged.
        """
        self.name, self.id = entry.name, entry.id
        self._files, self._layout = files, files.layout
        self._durability, self._on_close = durability, on_close
        self._reader = LayerReader(files)
        layers, payload = self._layout.layers, self._layout.payload_bytes
        tail = files.open_value(contents.tail, self.name, "tail", entry.stored)
        tokens = files.open_value(contents.tokens, self.name, "tokens", entry.token_count)
        state = files.open_value(contents.state, self.name, "state", entry.token_count)
        self._tokens = token_ids(tokens).tolist()
        self.state: dict[str, Any] = msgspec.json.decode(state)
        self._at = np.full(layers, entry.stored, np.int64)
        self._tail = aligned_buffer(layers * payload).reshape(layers, payload)
        self._restore_tail(tail, entry.stored % SESSION_GROUP)
        self.reused = self._floor = entry.stored
        self._committed = entry.committed
        self.bytes_written = 0
        self._scratch: np.ndarray | None = None
        self._opened: dict[str, SequenceFile] = {}
        self._dirty: set[str] = set()
        self._created: set[str] = set()  # files that the catalogue does not know yet
        self._closed = False
        self._places = Places(contents.spans)
        try:
            for span in contents.spans:
                if span.file not in self._opened:
                    self._opened[span.file] = files.open(span.file)
            self._begin(count(contents.spans))
        except BaseException:
            self._release(keep=set())
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokens(self) -> list[int]:
        """Token ids as of the last commit or `truncate`, those whose K and V are not stored yet included."""
        return list(self._tokens)

    @property
    def stored(self) -> int:
        """Tokens from the first on whose K and V of every layer can be read back."""
        return int(self._at.min())

    # ---- reading -------------------------------------------------------------------------------------

    def kv(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """K [Hkv, D, stored] and V [Hkv, stored, D] of a layer, verified. Layers asked for in their order are read
        ahead.

        Raises:
          TierError: a record cannot be read, or is not what was written.
        """
        self._check_open()
        stored, at = self.stored, int(self._at[layer])
        groups = min(at // SESSION_GROUP, -(-stored // SESSION_GROUP))
        k, v = self._reader.layer(layer, self._places.spans(groups), self._opened, stored)
        whole = groups * SESSION_GROUP
        if whole < stored:
            k_tail, v_tail = self._layout.parts(self._tail[layer][None])
            k[:, :, whole:] = k_tail[0, :, :, : stored - whole]
            v[:, whole:] = v_tail[0, :, : stored - whole]
        return k, v

    # ---- writing -------------------------------------------------------------------------------------

    def write(self, layer: int, first: int, k: np.ndarray, v: np.ndarray) -> None:
        """Stores K [Hkv, D, n] and V [Hkv, n, D] of the tokens from `first` on. A `first` before the end of what the
        layer has is a `truncate` to there.

        Whole groups are on their way to the disk when it returns, the rest is kept in memory until `commit`.

        Raises:
          TierError: the disk or its limit has no room, or the write keeps failing.
          ValueError: wrong shapes, or tokens before `first` are missing.
        """
        self._check_open()
        n = self._check_kv(k, v)
        if first > self._at[layer]:
            raise ValueError(f"layer {layer} has {self._at[layer]} tokens: cannot write from {first} on")
        if first < self._at[layer]:
            self.truncate(first)
        done = 0
        while done < n:
            group, offset = divmod(first + done, SESSION_GROUP)
            if offset == 0 and n - done >= SESSION_GROUP:
                whole = (n - done) // SESSION_GROUP
                tokens = slice(done, done + whole * SESSION_GROUP)
                self._write_groups(layer, group, k[:, :, tokens], v[:, tokens])
                done = tokens.stop
            else:
                part = slice(done, done + min(SESSION_GROUP - offset, n - done))
                k_tail, v_tail = self._layout.parts(self._tail[layer][None])
                k_tail[0, :, :, offset : offset + part.stop - done] = k[:, :, part]
                v_tail[0, :, offset : offset + part.stop - done] = v[:, part]
                if offset + part.stop - done == SESSION_GROUP:
                    self._write_groups(layer, group, k_tail[0], v_tail[0])
                done = part.stop
            self._at[layer] = first + done

    def truncate(self, tokens: int) -> None:
        """Forgets everything from token number `tokens` on. The disk learns of it with the next commit.

        Raises:
          TierError: the group that `tokens` lies within cannot be read back.
        """
        self._check_open()
        if tokens < 0:
            raise ValueError(f"cannot truncate to {tokens} tokens")
        group, rest = divmod(tokens, SESSION_GROUP)
        beyond = np.flatnonzero(self._at // SESSION_GROUP > group)
        if len(beyond) and rest:
            records = [self._record(int(layer), group) for layer in beyond]
            self._tail[beyond] = np.stack(records)
        if len(beyond):
            self._begin(group)
        self._reader.forget()
        self._at = np.minimum(self._at, tokens)
        self._floor = min(self._floor, tokens)
        self._tokens = self._tokens[:tokens]

    def commit(self, tokens: Sequence[int], state: dict[str, Any], *, close: bool = False) -> None:
        """Makes what every layer has written, its token ids and `state` (JSON) what a later process finds.

        `tokens` may be more than the ones stored: those that were sampled but not computed with yet. Whether it has
        reached the disk itself when this returns, and so survives a loss of power, is up to the store's durability;
        it survives this process in any case.

        Args:
          close: this is the last commit, which durability "close" makes durable.

        Raises:
          TierError: no room, or the disk fails; the session is on disk as it was before.
          ValueError: `tokens` are fewer than the ones stored, or not those that what is stored was committed with.
        """
        self._check_open()
        tokens, stored = list(tokens), self.stored
        if len(tokens) < stored:
            raise ValueError(
                f"K and V of {stored} tokens are stored, {len(tokens)} token ids given; truncate first"
            )
        if tokens[: self._floor] != self._tokens[: self._floor]:
            raise ValueError(
                f"other token ids than those that the first {self._floor} K and V were stored with"
            )
        durable = self._durability == "group" or (close and self._durability == "close")
        if durable:
            for name in list(self._dirty):
                self._opened[name].sync()
                self._dirty.discard(name)
            self._files.disk.sync_directory()
        seal, length = self._files.seal_value, len(tokens)
        contents = SessionContents(
            tokens=seal(np.array(tokens, "<i4").tobytes(), self.name, "tokens", length),
            tail=seal(self._tail_bytes(stored), self.name, "tail", stored),
            state=seal(msgspec.json.encode(state), self.name, "state", length),
            spans=self._places.spans(stored // SESSION_GROUP),
        )
        used = {span.file for span in contents.spans}
        writing = self._places.writing
        disk = self._files.disk
        with disk.room(contents.growth):
            catalog = disk.sessions.catalog()
            with catalog.transaction(durable=durable):
                catalog.save(self.id, contents, stored=stored, tokens=len(tokens))
                for name in used & (self._created | writing):
                    catalog.add_file(name, self.id, self._opened[name].header.end)
            self._created -= used
            self._release(keep=used | writing)
            disk.sessions.delete_unused()
        self.bytes_written += contents.nbytes
        self._tokens, self.state, self._floor, self._committed = tokens, state, stored, True

    def close(self) -> None:
        """Ends the use of the session; what was not committed is lost. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        disk = self._files.disk
        try:
            with disk.exclusive():
                self._release(keep=set())
        finally:
            self._on_close(self)

    @property
    def committed(self) -> bool:
        """Whether there is a commit of it at all."""
        return self._committed

    # ---- inside --------------------------------------------------------------------------------------

    def _begin(self, group: int) -> None:
        """What is written from `group` on goes after the group before it in its file, if that is this session's to
        append to and nobody, this session's own last commit included, has anything there; else into a new file."""
        last = next(iter(reversed(self._places.spans(group))), None)
        place = None
        if last is not None:
            with self._files.disk.exclusive():
                catalog = self._files.disk.sessions.catalog()
                own = last.file in self._created or catalog.owner(last.file) == self.id
                if own and catalog.committed_groups(last.file) <= last.first + last.groups:
                    place = last.file, last.first + last.groups
        self._places.begin(group, place)

    def _write_groups(self, layer: int, group: int, k: np.ndarray, v: np.ndarray) -> None:
        """Whole groups from `group` on to where they belong, at most a buffer's worth at a time."""
        stop = group + v.shape[1] // SESSION_GROUP
        for run, first, end in self._places.runs(group, stop):
            if run.file is None:
                created = self._files.create(end - run.start)
                run.file = created.sequence
                self._opened[run.file] = created
                self._created.add(run.file)
            file = self._opened[run.file]
            file.reserve(run.place(end))
            self._dirty.add(run.file)
            for at in range(first, end, _WRITE_GROUPS):
                records = self._records(file, min(_WRITE_GROUPS, end - at))
                tokens = slice((at - group) * SESSION_GROUP, (at - group + len(records)) * SESSION_GROUP)
                self._layout.pack(k[:, :, tokens], v[:, tokens], records)
                self._files.write(file, layer, run.place(at), records, run.nonce)
                self.bytes_written += records.nbytes

    def _records(self, file: SequenceFile, n: int) -> np.ndarray:
        if self._scratch is None or len(self._scratch) < n or self._scratch.shape[1] != file.stride:
            self._scratch = file.buffer(n)
        return self._scratch[:n]

    def _record(self, layer: int, group: int) -> np.ndarray:
        """The payload of one record, uint8 [payload_bytes]."""
        span = self._places.spans(group + 1)[-1]
        file = self._opened[span.file]
        out, nonces = file.buffer(1), np.array([span.nonce], np.uint64)
        self._files.read(file, layer, span.first + span.groups - 1, nonces, out)
        return out[0, : self._layout.payload_bytes]

    def _tail_bytes(self, stored: int) -> bytes:
        """K [L, Hkv, D, t], then V [L, Hkv, t, D] of the tokens after the last whole group."""
        group, rest = divmod(stored, SESSION_GROUP)
        if not rest:
            return b""
        payloads = self._tail
        filed = np.flatnonzero(self._at // SESSION_GROUP > group)
        if len(filed):
            payloads = payloads.copy()
            payloads[filed] = np.stack([self._record(int(layer), group) for layer in filed])
        k, v = self._layout.parts(payloads)
        return k[..., :rest].tobytes() + v[:, :, :rest].tobytes()

    def _restore_tail(self, data: bytes, tokens: int) -> None:
        layout = self._layout
        if len(data) != tokens * layout.token_bytes * layout.layers:
            raise TierError(
                f"session {self.name!r} is damaged: its last {tokens} tokens take {len(data)} bytes; delete it"
            )
        half = len(data) // 2
        k, v = layout.parts(self._tail)
        shape = (layout.layers, layout.kv_heads)
        k[..., :tokens] = np.frombuffer(data[:half], layout.dtype).reshape(*shape, layout.head_dim, tokens)
        v[:, :, :tokens] = np.frombuffer(data[half:], layout.dtype).reshape(*shape, tokens, layout.head_dim)

    def _release(self, keep: set[str]) -> None:
        going = self._opened.keys() - keep
        if going:
            self._reader.forget()  # nobody may be reading what is closed
        for name in going:
            del self._opened[name]
            self._dirty.discard(name)
            self._files.release(name)
            if name in self._created:
                self._created.discard(name)
                self._files.disk.delete(name)

    def _check_kv(self, k: np.ndarray, v: np.ndarray) -> int:
        layout, n = self._layout, v.shape[1]
        shapes = (layout.kv_heads, layout.head_dim, n), (layout.kv_heads, n, layout.head_dim)
        if (k.shape, v.shape) != shapes or (k.dtype, v.dtype) != (layout.dtype, layout.dtype):
            raise ValueError(f"K {k.dtype}{k.shape} and V {v.dtype}{v.shape}, not {layout.dtype} {shapes}")
        return n

    def _check_open(self) -> None:
        if self._closed:
            raise TierError(f"session {self.name!r} is closed; open it in its store again")
