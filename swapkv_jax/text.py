"""From a generation's token ids to text as it appears: stop strings, and rows in readable order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swapkv_jax.models import Tokenizer


class RowText:
    """The text of one row. Holds back what may turn out to be the beginning of a stop string.

    Attributes:
      text: what has been released so far.
      stopped: whether a stop string has been met; nothing is released from it on.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]):
        self._decoder = tokenizer.stream(prompt)
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.token_ids: list[int] = []
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Takes a token and returns the text it releases."""
        self.token_ids.append(token)
        return self._release(self._decoder.push(token))

    def flush(self) -> str:
        """The row is over: returns what was still held back."""
        released = self._release(self._decoder.flush())
        released, self._held, rest = released + self._held, "", self._held
        self.text += rest
        return released

    def _release(self, new: str) -> str:
        if self.stopped:
            return ""
        self._held += new
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            released, self._held = self._held[: min(found)], ""
        else:
            keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
            cut = len(self._held) - keep
            released, self._held = self._held[:cut], self._held[cut:]
        self.text += released
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class OrderedOutput:
    """Writes several rows as one readable stream: a row as it comes once all rows before it are complete.

    With more than one row each begins with a heading line.
    """

    def __init__(self, rows: int, write: Callable[[str], object]):
        self._write = write
        self._waiting = [""] * rows
        self._done = [False] * rows
        self._current = -1
        self._advance()

    def push(self, row: int, text: str) -> None:
        """More text of a row."""
        if row == self._current:
            self._write(text)
        else:
            self._waiting[row] += text

    def end(self, row: int) -> None:
        """A row is complete."""
        self._done[row] = True
        while self._current < len(self._done) and self._done[self._current]:
            self._write("\n")
            self._advance()

    def _advance(self) -> None:
        self._current += 1
        if self._current < len(self._done):
            if len(self._done) > 1:
                self._write(f"=== prompt {self._current + 1} ===\n")
            self._write(self._waiting[self._current])
