"""What the engine does for rows that belong to named sessions: takes up what is stored, and hands on what is new.

A session's keys and values are kept apart from any policy's working cache, so that one that was saved under one
plan can be taken up under every other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from swapkv_jax.errors import UsageError
from swapkv_jax.models import DTYPES, Model
from swapkv_jax.sessions import SESSION_GROUP, Identity, Session

_BY_LENGTH = ("dynamic",)
Newest = Callable[[int], tuple[np.ndarray, np.ndarray]]


class SessionRows:
    """The sessions of a generation's rows; a row without one is prefilled whole and nothing of it is kept.

    Attributes:
      reused: per row, how many of its prompt's tokens need no prefill. Never all of them: the last one's logits
        choose the first new token.
      continuing: every row has all but its last token, so that decode goes on where it stopped.
    """

    def __init__(self, sessions: Sequence[Session | None], prompts: Sequence[Sequence[int]], model: Model):
        """Cuts each session back to what its row's prompt has in common with it."""
        self._sessions = list(sessions)
        self._tokens = [list(prompt) for prompt in prompts]
        self.reused = [
            0 if session is None else _common(session, prompt)
            for session, prompt in zip(sessions, prompts, strict=True)
        ]
        pairs = zip(self.reused, prompts, strict=True)
        self.continuing = all(reused == len(prompt) - 1 > 0 for reused, prompt in pairs)
        for session, reused in zip(self._sessions, self.reused, strict=True):
            if session is not None and session.stored > reused:
                session.truncate(reused)
        g = model.geometry
        group = (len(self._sessions), g.layers, g.kv_heads)
        self._layers = g.layers
        self._k = np.zeros((*group, g.head_dim, SESSION_GROUP), DTYPES[model.dtype])
        self._v = np.zeros((*group, SESSION_GROUP, g.head_dim), DTYPES[model.dtype])
        self._first = list(self.reused)  # position of the first token in those buffers, per row
        self._count = [0] * len(self._sessions)
        self._whole: list[int] = []  # rows with a group that became whole and is not committed

    def kv(self, row: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """K [Hkv, D, n] and V [Hkv, n, D] of the row's `reused` tokens."""
        session, n = self._sessions[row], self.reused[row]
        assert session is not None
        k, v = session.kv(layer)
        return k[:, :, :n], v[:, :n]

    def keeps(self, row: int) -> bool:
        """Whether the row has a session."""
        return self._sessions[row] is not None

    def prefilled(self, row: int, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        """Hands on a layer's K [Hkv, D, S] and V [Hkv, S, D] of the prompt's tokens that were not reused."""
        session, first, stop = self._sessions[row], self.reused[row], len(self._tokens[row])
        assert session is not None
        session.write(layer, first, k[:, :, first:stop], v[:, first:stop])
        self._first[row] = stop

    def commit(self) -> None:
        """Every row's prompt is prefilled."""
        for row, session in enumerate(self._sessions):
            if session is not None:
                session.commit(self._tokens[row], session.state)

    def chosen(self, tokens: Sequence[int | None]) -> None:
        """The rows' next tokens, whose K and V no cache has yet. Commits the groups that became whole before them:
        what is saved can then be taken up without the prompt's logits."""
        for row, token in enumerate(tokens):
            if token is not None:
                self._tokens[row].append(token)
        for row in self._whole:
            session = self._sessions[row]
            assert session is not None
            session.commit(self._tokens[row], session.state)
        self._whole.clear()

    def stepped(self, active: np.ndarray, newest: Newest) -> None:
        """Takes the K and V, [B, Hkv, D] per layer, that the last step has added to its active rows; to be called
        before `chosen`."""
        rows = [row for row in np.flatnonzero(active).tolist() if self._sessions[row] is not None]
        if not rows:
            return
        for layer in range(self._layers):
            k, v = newest(layer)
            for row in rows:
                self._k[row, layer, :, :, self._count[row]] = k[row]
                self._v[row, layer, :, self._count[row]] = v[row]
        for row in rows:
            self._count[row] += 1
            if (self._first[row] + self._count[row]) % SESSION_GROUP == 0:
                self._flush(row)
                self._whole.append(row)

    def finish(self) -> None:
        """The generation is over: everything is handed on and committed."""
        for row, session in enumerate(self._sessions):
            if session is not None:
                self._flush(row)
                session.commit(self._tokens[row], session.state, close=True)

    def _flush(self, row: int) -> None:
        session, n, first = self._sessions[row], self._count[row], self._first[row]
        assert session is not None
        if n:
            for layer in range(self._layers):
                session.write(layer, first, self._k[row, layer, :, :, :n], self._v[row, layer, :, :n])
            self._first[row], self._count[row] = first + n, 0


def identity_of(model: Model) -> Identity:
    """What a session's keys and values depend on besides its token ids, and what gives those their meaning."""
    g = model.geometry
    return Identity(
        fingerprint=f"{model.fingerprint}-{model.tokenizer.digest}",
        dtype=model.dtype,
        layers=g.layers,
        kv_heads=g.kv_heads,
        head_dim=g.head_dim,
    )


def check_sessions(
    sessions: Sequence[Session | None], prompts: Sequence[Sequence[int]], model: Model
) -> None:
    """Raises UsageError for sessions that these rows of this model cannot continue."""
    if len(sessions) != len(prompts):
        raise UsageError(
            f"{len(sessions)} sessions for {len(prompts)} prompts; give one, or None, per prompt"
        )
    named = [session.name for session in sessions if session is not None]
    if len(set(named)) < len(named):
        raise UsageError("two rows cannot continue one session; fork it")
    scaling = model.geometry.rope_scaling
    if named and scaling is not None and scaling.kind in _BY_LENGTH:
        raise UsageError(
            f"this model's keys depend on the length of the prompt they were computed in ({scaling.kind} RoPE "
            "scaling), so that stored ones cannot be continued; leave the session out"
        )


def _common(session: Session, prompt: Sequence[int]) -> int:
    """Tokens at the beginning of `prompt` whose K and V the session has, all but the last one at most."""
    n = min(session.stored, len(prompt) - 1)
    differs = np.flatnonzero(np.asarray(session.tokens[:n]) != np.asarray(prompt[:n]))
    return int(differs[0]) if differs.size else n
