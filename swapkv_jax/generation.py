"""The host loop of one generation: prefill layer by layer, then one token per row and step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as PyGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from swapkv_jax.compile_counter import compiles
from swapkv_jax.graph import scalar
from swapkv_jax.interrupts import checkpoint, interrupts_deferred
from swapkv_jax.prefilled import Prefilled, write_row
from swapkv_jax.sampling import Sampling
from swapkv_jax.session_rows import SessionRows
from swapkv_jax.staging import fetch, read_only_view

if TYPE_CHECKING:
    from swapkv_jax.engine import Engine
    from swapkv_jax.sessions import Session

PrefillProgress = Callable[[int, int], None]  # layers of rows done, and in all


@dataclass(frozen=True)
class Step:
    """One new token per row: None for rows that were done before. `logits` [B, V] only when asked for."""

    tokens: list[int | None]
    logits: np.ndarray | None = None


class Generation:
    """The tokens of one batch of prompts, made as they are asked for.

    Attributes:
      finish_reasons: per row "stop" (end-of-text token), "length", what `finish_row` was given, or None
        while the row goes on.
      ttft_s: seconds from the first `next()` to the first token. step_s: seconds of each later step.
      compiles_during_decode: graphs compiled after the first token. Always 0.
      reused_tokens: per row, tokens of its prompt whose keys and values came from its session.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        eos: frozenset[int],
        return_logits: bool,
        forced: Sequence[Sequence[int]] | None,
        on_prefill: PrefillProgress | None,
        prefilled: Prefilled | None,
        sessions: Sequence[Session | None] | None,
    ):
        self._engine, self._cache = engine, engine._cache
        self._prompts, self._max_new, self._eos = prompts, max_new_tokens, eos
        self._return_logits, self._forced, self._on_prefill = return_logits, forced, on_prefill
        self._prefilled = prefilled
        self._head = engine.program.head[sampling]
        params = engine.params
        self._head_params = {k: params[k] for k in ("final_norm", "embed", "head") if k in params}
        self._held = np.array([len(p) for p in prompts])  # tokens each row has in the cache
        self._active = np.ones(len(prompts), bool)
        self._advance: np.ndarray | None = None  # what engine._advance holds
        self._made = 0
        self._rows = SessionRows(sessions, prompts, engine.model) if sessions is not None else None
        self.reused_tokens = self._rows.reused if self._rows is not None else [0] * len(prompts)
        self.finish_reasons: list[str | None] = [None] * len(prompts)
        self.ttft_s: float | None = None
        self.step_s: list[float] = []
        self.compiles_during_decode = 0
        self._steps = self._run()

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        return next(self._steps)

    def finish_row(self, row: int, reason: str) -> None:
        """Ends a row between two steps, as when a stop string has been seen."""
        if self._active[row]:
            self._active[row] = False
            self.finish_reasons[row] = reason

    def close(self) -> None:
        """Ends the generation where it is; its sequences become past."""
        self._steps.close()

    def _run(self) -> PyGenerator[Step, None, None]:
        started = time.perf_counter()
        try:
            self._cache.begin(
                [len(p) for p in self._prompts], [len(p) + self._max_new for p in self._prompts]
            )
            if self._prefilled is not None:
                self._take_prefilled(self._prefilled)
            elif self._rows is not None and self._rows.continuing:
                self._held = self._held - 1
                self._take_sessions(self._rows)
            else:
                self._prefill()
            self._engine._assign("lengths", self._held)
            self._engine._assign("forced", np.full(len(self._prompts), -1))
            self._cache.start()
            step = self._first_step()
            self.ttft_s = time.perf_counter() - started
            yield step
            compiled = compiles()
            while self._active.any():
                checkpoint()
                started = time.perf_counter()
                with jax.no_tracing(True):
                    step = self._step()
                self.step_s.append(time.perf_counter() - started)
                self.compiles_during_decode = compiles() - compiled
                yield step
            self._finish_sessions()
        except (GeneratorExit, KeyboardInterrupt):  # whoever takes the tokens has enough of them
            self._finish_sessions()
            self._engine._allocate_state()
            raise
        except BaseException:
            self._engine._allocate_state()
            raise
        finally:
            self._cache.finish()

    def _prefill(self) -> None:
        """Layer-major, row by row: one layer takes all of a prompt's chunks before the next layer begins."""
        engine, program = self._engine, self._engine.program
        layers = engine.params["layers"]
        total = len(layers) * len(self._prompts)
        rows = self._rows
        for row, prompt in enumerate(self._prompts):
            reused = self.reused_tokens[row]
            hidden = program.embed_prompt(engine.params["embed"], prompt, reused)
            for layer, params in enumerate(layers):
                checkpoint()
                k, v = self._cache.slot(layer)
                at = row if k.shape[0] > 1 else 0
                if rows is not None and reused:
                    k, v = _write_kv(k, v, rows.kv(row, layer), at)
                hidden, k, v = program.prefill_layer(params, hidden, k, v, at, len(prompt), reused)
                if rows is not None and rows.keeps(row):
                    rows.prefilled(row, layer, read_only_view(k)[at], read_only_view(v)[at])
                self._cache.filled(layer, row, len(prompt), k, v)
                if self._on_prefill is not None:
                    jax.block_until_ready(hidden[-1])  # progress that is true
                    self._on_prefill(row * len(layers) + layer + 1, total)
            start, size = program.chunks(len(prompt), reused)[-1]
            last = scalar(len(prompt) - 1 - start)
            engine._x = program.take[size](engine._x, hidden[-1], scalar(row), last)
        if rows is not None:
            rows.commit()

    def _take_prefilled(self, source: Prefilled) -> None:
        """What the source has takes the ordinary way into the cache and its tiers."""
        engine, program = self._engine, self._engine.program
        size = min(program.take)
        for row in range(len(self._prompts)):
            self._take_row(source, row)
            last = np.zeros((size, self._engine.model.geometry.hidden), engine._x.dtype)
            last[0] = source.hidden(row)
            engine._x = program.take[size](engine._x, last, scalar(row), scalar(0))

    def _take_sessions(self, rows: SessionRows) -> None:
        """All rows' tokens but the last ones, which decode computes as it would have without the interruption."""
        for row in range(len(self._prompts)):
            self._take_row(rows, row)

    def _take_row(self, source: Prefilled | SessionRows, row: int) -> None:
        layers, held = len(self._engine.params["layers"]), int(self._held[row])
        for layer in range(layers):
            checkpoint()
            k, v = self._cache.slot(layer)
            k, v = _write_kv(k, v, source.kv(row, layer), row if k.shape[0] > 1 else 0)
            self._cache.filled(layer, row, held, k, v)
            if self._on_prefill is not None:
                self._on_prefill(row * layers + layer + 1, layers * len(self._prompts))

    def _first_step(self) -> Step:
        """The first new token: of the prefill's hidden states, or of a step on the prompts' last tokens."""
        nobody = np.zeros_like(self._active)
        if self._rows is None or not self._rows.continuing:
            self._launch_head(nobody)
            step = self._collect()
            if self._rows is not None:
                self._rows.chosen(step.tokens)
            return step
        forced = self._forced
        self._forced = [[prompt[-1]] for prompt in self._prompts]
        self._launch_head(nobody)  # embeds those tokens
        self._forced = forced
        self._engine._assign("forced", np.full(len(self._prompts), -1))
        return self._step()

    def _finish_sessions(self) -> None:
        if self._rows is not None and self.ttft_s is not None:
            with interrupts_deferred():  # who is impatient does not lose what was decoded
                self._rows.finish()

    def _step(self) -> Step:
        engine = self._engine
        active = self._active.copy()
        engine._x = self._cache.step(engine.params["layers"], engine._x, engine._lengths, self._held, active)
        self._launch_head(active)
        self._cache.settle(self._held, active)
        held, self._held = self._held, self._held + active
        step = self._collect()
        if self._rows is not None:
            with interrupts_deferred():  # or keys and values would be saved of more tokens than are known
                self._rows.stepped(active, lambda layer: self._cache.newest(layer, held))
                self._rows.chosen(step.tokens)
        return step

    def _launch_head(self, advance: np.ndarray) -> None:
        """Moves the lengths of `advance` rows on and picks every row's next token, on the device."""
        engine = self._engine
        if self._forced is not None:
            engine._assign("forced", np.array([tokens[self._made] for tokens in self._forced]))
        if self._advance is None or not np.array_equal(advance, self._advance):
            self._advance = advance
            engine._assign("advance", advance)
        engine._x, engine._tokens, engine._lengths, engine._logits = self._head(
            self._head_params,
            engine._x,
            engine._tokens,
            engine._lengths,
            engine._logits,
            engine._advance,
            engine._forced,
        )

    def _collect(self) -> Step:
        """The tokens that the head has picked, and which rows they end."""
        engine, rows = self._engine, len(self._prompts)
        self._made += 1
        chosen = fetch(engine._tokens)
        logits = fetch(engine._logits) if self._return_logits else None
        tokens: list[int | None] = [None] * rows
        for row in np.flatnonzero(self._active):
            token = int(chosen[row])
            tokens[row] = token
            if token in self._eos:
                self.finish_row(int(row), "stop")
            elif self._made == self._max_new:
                self.finish_row(int(row), "length")
        return Step(tokens, logits)


def _write_kv(
    k: jax.Array, v: jax.Array, parts: tuple[np.ndarray, np.ndarray], row: int
) -> tuple[jax.Array, jax.Array]:
    return write_row(k, parts[0], row), write_row(v, parts[1], row)
