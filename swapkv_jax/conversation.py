"""The decode command's named sessions: opened by flags, continued by one more text."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from swapkv_jax.errors import UsageError
from swapkv_jax.memory_limits import exact_bytes, format_bytes
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

    def check_context(self, new_tokens: int, limit: int) -> None:
        """Raises UsageError if the conversation would pass `limit` tokens."""
        if len(self.prompt) + new_tokens > limit:
            raise UsageError(
                f"session {self.session.name!r} holds {self.known} tokens; {len(self.prompt) - self.known} of this "
                f"prompt and {new_tokens} new ones pass the limit of {limit}: lower --max-new-tokens, raise "
                "--max-context up to the model's own limit, or begin another session"
            )

    def check_room(self, new_tokens: int, limit: int | None, working_bytes: int) -> None:
        """Raises UsageError if the store's `limit` is less than the session may take beside `working_bytes`, the
        plan's own on disk."""
        _check_room(self.store, self.session.name, len(self.prompt) + new_tokens, limit, working_bytes)

    def report(self) -> dict[str, Any]:
        """What the session holds and has cost, as JSON values."""
        session = self.session
        return {
            "name": session.name,
            "tokens": len(session.tokens),
            "stored_tokens": session.stored,
            "bytes_written": session.bytes_written,
            "bytes_written_per_token": session.bytes_written / max(1, session.stored - session.reused),
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
    if text == "":
        raise UsageError("the prompt is empty; give it some text, or leave it out to go on with the session")
    store = SessionStore(
        options.store_dir or default_store_dir(),
        identity=identity_of(model),
        limit_bytes=limit,
        durability=options.durability,
        cipher=cipher_of(options.key_file, options.keyring),
    )
    try:
        first = model.tokenizer.encode(text, chat=chat) if text is not None else []
        # Before anything is made room for.
        _check_room(store, options.session, len(first) + options.max_new_tokens, limit)
        with store.open(options.session, first[:-1]) as session:
            known = len(session.tokens) if session.committed else 0
            if known:
                prompt = _continued(session, model, text, chat, options.ignore_eos)
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
        if store.evicted:
            names = ", ".join(map(repr, store.evicted))
            warnings.warn(
                f"to keep to --disk-space, past sessions were deleted: {names}", RuntimeWarning, stacklevel=2
            )


def _check_room(
    store: SessionStore, name: str, tokens: int, limit: int | None, working_bytes: int = 0
) -> None:
    need = store.bytes_of(tokens) + working_bytes
    if limit is not None and need > limit:
        own = " and the plan's own files" if working_bytes else ""
        raise UsageError(
            f"session {name!r} of up to {tokens} tokens{own} may take {exact_bytes(need)} of --disk-space, "
            f"{format_bytes(need - limit)} over the limit of {format_bytes(limit)}; raise it, or lower "
            "--max-new-tokens"
        )


def _continued(session: Session, model: Model, text: str | None, chat: bool, ignore_eos: bool) -> list[int]:
    began = session.state.get("chat")
    if began is not None and began != chat:
        raise UsageError(
            f"session {session.name!r} was begun with {'--chat' if began else '--raw'}; go on with that"
        )
    if text is not None:
        return [*session.tokens, *model.tokenizer.encode_turn(text, session.tokens, chat=chat)]
    if session.tokens[-1] in model.eos_token_ids and not ignore_eos:
        raise UsageError(
            f"session {session.name!r} has ended its answer, so there is nothing to go on with: give --prompt, or "
            "--ignore-eos"
        )
    return session.tokens
