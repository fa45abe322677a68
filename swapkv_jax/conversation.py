"""The decode command's named sessions: opened by flags, continued by one more text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from swapkv_jax.errors import UsageError
from swapkv_jax.models import Model
from swapkv_jax.sampling import Sampling
from swapkv_jax.session_rows import identity_of
from swapkv_jax.sessions import Session, SessionStore
from swapkv_jax.sessions.aes_gcm import cipher_of
from swapkv_jax.store_paths import default_store_dir


@dataclass(frozen=True)
class Conversation:
    """An open session and the prompt that continues it; `known` tokens of the prompt are the session's own."""

    store: SessionStore
    session: Session
    prompt: list[int]
    known: int

    def report(self) -> dict[str, Any]:
        """What the session holds and has cost, as JSON values."""
        session = self.session
        return {
            "name": session.name,
            "tokens": len(session.tokens),
            "stored_tokens": session.stored,
            "bytes_written": session.bytes_written,
            "durability": self.store.durability,
            "notes": list(self.store.notes),
        }


@contextmanager
def open_conversation(
    options: argparse.Namespace,
    model: Model,
    text: str | None,
    chat: bool,
    sampling: Sampling,
    limit: int | None,
) -> Iterator[Conversation]:
    """The session of the flags, with its prompt: what it holds, and `text` after that.

    Without a text, an answer that was cut short goes on.

    Raises:
      UsageError: there is nothing to continue, or the flags contradict how the session began.
      TierError: somebody else is writing it, or it is damaged.
    """
    store = SessionStore(
        options.store_dir or default_store_dir(),
        identity=identity_of(model),
        limit_bytes=limit,
        durability=options.durability,
        cipher=cipher_of(options.key_file, options.keyring),
    )
    try:
        first = model.tokenizer.encode(text, chat=chat) if text is not None else []
        with store.open(options.session, first[:-1]) as session:
            known = len(session.tokens) if session.committed else 0
            if known:
                prompt = _continued(session, model, text, chat)
            elif text is None:
                raise UsageError(
                    f"session {options.session!r} does not exist yet: begin it with --prompt or --prompt-file"
                )
            else:
                prompt = first
            session.state = {"chat": chat, "sampling": msgspec.to_builtins(sampling)}
            yield Conversation(store, session, prompt, known)
    finally:
        store.close()


def _continued(session: Session, model: Model, text: str | None, chat: bool) -> list[int]:
    began = session.state.get("chat")
    if began is not None and began != chat:
        raise UsageError(
            f"session {session.name!r} was begun with {'--chat' if began else '--raw'}; go on with that"
        )
    if text is not None:
        return [*session.tokens, *model.tokenizer.encode_turn(text, session.tokens, chat=chat)]
    if session.tokens[-1] in model.eos_token_ids:
        raise UsageError(
            f"session {session.name!r} has ended its answer, so there is nothing to go on with: give --prompt"
        )
    return session.tokens
