"""Keys and values of one sequence in the form in which llama.cpp saves and restores them, so that it can start from a
prefill that it did not compute."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

_TYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}  # ggml's numbers
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_K_HEAD = np.dtype([("type", "<i4"), ("row_bytes", "<u8")])
_V_HEAD = np.dtype([("type", "<i4"), ("value_bytes", "<u4"), ("width", "<u4")])  # where values lie transposed


@dataclass(frozen=True, kw_only=True)
class SequenceState:
    """What `llama_state_seq_get_data` gives of a context whose rows have a stream each: per layer all keys, then per
    layer all values, of `width` numbers per token.

    Attributes:
      rows: streams of the context.
      dtype: of its keys and values, float32 or float16.
      transposed: whether values lie as [width, tokens]; so they do without flash attention.
    """

    rows: int
    layers: int
    width: int
    dtype: np.dtype
    transposed: bool

    def empty(
        self, row: int, tokens: int, header: bytes = b""
    ) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """`header` and the bytes of a row with `tokens` tokens at positions 0, 1, …, and views of these to fill: per
        layer K [tokens, width] and V, [width, tokens] if transposed, else as K."""
        parts = self._parts(row, tokens)
        blob = np.zeros(len(header) + sum(part.nbytes for part in parts), np.uint8)
        blob[: len(header)] = np.frombuffer(header, np.uint8)
        views, at = [], len(header)
        for part in parts:
            view = blob[at : at + part.nbytes]
            at += part.nbytes
            if part.dtype == self.dtype:
                views.append(view.view(part.dtype).reshape(part.shape))
            else:
                view[:] = part.view(np.uint8).reshape(-1)
        return blob, views[: self.layers], views[self.layers :]

    def header(self, blob: np.ndarray, row: int, tokens: int) -> bytes | None:
        """What precedes all this in `blob`, uint8, if that is how it holds the row: everything after it but the keys
        and values themselves is as here. None if it is not. (Versions differ in what comes first.)"""
        ours, *views = self.empty(row, tokens)
        first = len(blob) - len(ours)
        if first < 0:
            return None
        known = np.ones(len(ours), np.bool_)
        for view in itertools.chain(*views):
            start = view.ctypes.data - ours.ctypes.data
            known[start : start + view.nbytes] = False
        return blob[:first].tobytes() if np.array_equal(ours[known], blob[first:][known]) else None

    def _parts(self, row: int, tokens: int) -> list[np.ndarray]:
        """All that follows one another; zeros of `dtype` where keys and values go."""
        kind, size = _TYPES[self.dtype], self.dtype.itemsize
        cells = np.zeros(tokens, _CELL)
        cells["position"], cells["sequences"], cells["sequence"] = np.arange(tokens), 1, row
        others = [np.zeros(row, "<u4"), np.zeros(self.rows - 1 - row, "<u4")]  # streams without this sequence
        keys_head = np.array([(kind, self.width * size)], _K_HEAD)
        values_head = np.array([(kind, size, self.width)], _V_HEAD) if self.transposed else keys_head
        k = np.zeros((tokens, self.width), self.dtype)
        v = k.reshape(self.width, tokens) if self.transposed else k
        return [
            np.array([self.rows], "<u4"),
            others[0],
            np.array([tokens], "<u4"),
            cells,
            np.array([self.transposed, self.layers], "<u4"),
            *[keys_head, k] * self.layers,
            *[values_head, v] * self.layers,
            others[1],
        ]
