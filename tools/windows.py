"""Pieces of real texts: prompts of one length, each with the tokens that follow it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swapkv_jax import UsageError
from swapkv_jax.models import Model


@dataclass(frozen=True)
class Window:
    """A piece of a text: `prompt`, and the tokens that follow it there."""

    text: str
    offset: int
    prompt: list[int]
    following: list[int]


def read_texts(paths: Sequence[Path], flag: str) -> dict[str, str]:
    """The texts by file name. UsageError names what cannot be read and the `flag` it came by."""
    texts = {path.name: _read(path, flag) for path in paths}
    if len(texts) < len(paths):
        raise UsageError(f"{flag} names two files alike; give each text once")
    return texts


def _read(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"cannot read {path}: {reason}; give {flag} UTF-8 texts") from None


def cut_windows(
    model: Model,
    texts: Mapping[str, str],
    rows: int,
    context: int,
    tokens: int,
    *,
    lower: str = "--rows, --context or --tokens",
) -> list[Window]:
    """`rows` windows of `context` tokens and `tokens` + 1 that follow, dealt over the texts and spread evenly over
    each, with equal gaps. A tokenizer that begins texts with a BOS gets it in every window.

    Raises:
      UsageError: a text is too short for its share; `lower` are the flags that could be lowered.
    """
    bos = model.tokenizer.encode("", chat=False)
    size = context + tokens + 1 - len(bos)
    windows = []
    for index, (name, text) in enumerate(texts.items()):
        share = len(range(index, rows, len(texts)))
        ids = model.tokenizer.encode(text, chat=False)[len(bos) :]
        if len(ids) < share * size:
            raise UsageError(
                f"{name} has {len(ids)} tokens, its {share} of {rows} rows take {share * size}; give longer or more "
                f"texts, or lower {lower}"
            )
        gap = (len(ids) - share * size) // (share + 1)
        for number in range(share):
            offset = gap + number * (gap + size)
            piece = [*bos, *ids[offset : offset + size]]
            windows.append(Window(name, offset, piece[:context], piece[context:]))
    return windows
