"""Text ↔ token ids, and text out of a stream of ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import tokenizers
import xxhash

from swapkv_jax.errors import ModelError, UsageError
from swapkv_jax.models.chat import render_chat, render_turn

_CONTEXT = 8  # ids of a prompt that a stream decodes against: enough for any multi-token character


class Tokenizer:
    """A `tokenizers.Tokenizer` with the model's chat template and special tokens.

    `vocab` is the number of rows of the model's embedding: an id beyond it is refused, never clamped.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab: int,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        # A saved tokenizer.json may carry the truncation of its training run.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._vocab = vocab
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def digest(self) -> str:
        """32 hex digits over everything that text is turned into ids by; equal ones give equal ids."""
        return xxhash.xxh3_128(self._backend.to_str().encode()).hexdigest()

    def id_of(self, token: str) -> int | None:
        """The id of a token given by its spelling, or None."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, chat: bool, answer: str = "") -> list[int]:
        """Token ids of `text`; special tokens spelled out in it are recognised.

        `chat=True` renders the chat template with `text` as the user's message, up to where the assistant
        answers; `answer` is how that answer begins. `chat=False` takes both as they are, after which the
        tokenizer's own rule about BOS still holds. Raises UsageError if there is no chat template or it fails,
        ModelError for an id that the model's embedding does not have.
        """
        if chat:
            if self.chat_template is None:
                raise UsageError("the model has no chat template; use --raw to continue the text as it is")
            text = render_chat(self.chat_template, text, self.special_tokens)
        return self._ids(text + answer, add_special_tokens=not chat)

    def encode_turn(self, text: str, history: Sequence[int], *, chat: bool) -> list[int]:
        """Token ids that continue `history`, which ends with an answer of the model's.

        `chat=True` ends the answer's turn, if its last token has not, and adds `text` as the user's next message,
        up to where the assistant answers. `chat=False` goes on with `text` as it is.
        Raises as `encode`.
        """
        if not chat:
            return self._ids(text, add_special_tokens=False)
        if self.chat_template is None:
            raise UsageError("the model has no chat template; use --raw to continue the text as it is")
        turn = render_turn(self.chat_template, text, self.special_tokens)
        last = self._backend.id_to_token(history[-1]) if history else None
        if last is not None and self._backend.token_to_id(last) in self._special_ids:
            turn = turn.removeprefix(last)  # the answer has ended its turn itself
        return self._ids(turn, add_special_tokens=False)

    @property
    def _special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if ids and max(ids) >= self._vocab:
            worst = max(ids)
            raise ModelError(
                f"token {self._backend.id_to_token(worst)!r} has id {worst}, but the model embeds "
                f"{self._vocab} tokens; use the tokenizer that belongs to these weights"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out, invalid UTF-8 as U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream(self, context: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for ids that come one by one.

        `context` are the ids before the first one (the prompt): with them, a tokenizer that drops the space
        before a text's first word knows that this is not the first.
        """
        return StreamDecoder(self, context)


class StreamDecoder:
    """Turns ids into text as they come; the pieces joined are the text.

    Ids since the last clean boundary are decoded with and without the newest, and the difference is new. Text
    that ends inside a character is held back until later ids complete it.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-_CONTEXT:])
        self._told = len(self._ids)
        self._told_text = tokenizer.decode(self._ids)

    def push(self, token: int) -> str:
        """Takes one id; returns the text that became certain, possibly empty."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if len(text) <= len(self._told_text) or text.endswith("\ufffd"):
            return ""
        new = text[len(self._told_text) :]
        # The ids told last stay as the context in which the next ones are decoded.
        self._ids = self._ids[self._told :]
        self._told = len(self._ids)
        self._told_text = self._tokenizer.decode(self._ids)
        return new

    def flush(self) -> str:
        """What was held back, as it is: an unfinished character comes out as U+FFFD."""
        text = self._tokenizer.decode(self._ids)
        new = text[len(self._told_text) :]
        self._told, self._told_text = len(self._ids), text
        return new
