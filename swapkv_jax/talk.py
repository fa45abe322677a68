"""What commands say on stderr: messages and progress bars."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm

from swapkv_jax.interrupts import checkpoint

Progress = Callable[[str, int, int], None]  # (what, done, total)


class Talk:
    """stderr, with or without the chatter."""

    def __init__(self, quiet: bool):
        self.quiet = quiet

    def __call__(self, text: str) -> None:
        if not self.quiet:
            self.always(text)

    def always(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def bars(self) -> Iterator[Progress]:
        """A function (what, done, total) that draws one progress bar after the other, and is a checkpoint of
        interrupts."""
        bar: tqdm | None = None
        current = ""

        def update(what: str, done: int, total: int) -> None:
            nonlocal bar, current
            checkpoint()
            if bar is None or what != current:
                if bar is not None:
                    bar.close()
                current = what
                bar = tqdm(
                    desc=what, total=total or None, file=sys.stderr, disable=self.quiet, mininterval=0.5
                )
            bar.update(done - bar.n)

        try:
            yield update
        finally:
            if bar is not None:
                bar.close()
