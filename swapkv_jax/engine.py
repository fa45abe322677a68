"""The host loop: prefill layer by layer, then one token per row and step, by graphs compiled beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as PyGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import jax
import numpy as np

from swapkv_jax.adapter import Adapter
from swapkv_jax.cache import CacheUse, make_cache
from swapkv_jax.calibration import ensure_adapter
from swapkv_jax.compile_counter import compiles
from swapkv_jax.errors import UsageError
from swapkv_jax.graph import scalar
from swapkv_jax.models import Model
from swapkv_jax.plan import Plan
from swapkv_jax.prefilled import Prefilled, check_prompts, write_row
from swapkv_jax.program import compile_program
from swapkv_jax.sampling import Sampling
from swapkv_jax.staging import fetch, zeros
from swapkv_jax.store_paths import default_store_dir

GREEDY = Sampling()
PrefillProgress = Callable[[int, int], None]  # layers of rows done, and in all


@dataclass(frozen=True)
class Step:
    """One new token per row: None for rows that were done before. `logits` [B, V] only when asked for."""

    tokens: list[int | None]
    logits: np.ndarray | None = None


class Engine:
    """A model under a plan: compiled, allocated, ready to generate. One generation at a time.

    ```python
    model = load_model("smollm2-135m")
    plan = make_plan(model.geometry, cache="layer", max_context=4096)
    with Engine(model, plan) as engine:
        for step in engine.generate([model.tokenizer.encode("Once upon a time", chat=False)]):
            print(step.tokens)
    ```
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        *,
        sampling: Sampling = GREEDY,
        store_dir: Path | None = None,
        disk_limit: int | None = None,
        adapter: Adapter | None = None,
    ):
        """Compiles the plan for `sampling` and allocates its buffers.

        Args:
          store_dir: directory of the disk store (default: in the user's cache); only tier `disk` uses it.
          disk_limit: bytes the store may take (default: what the disk has).
          adapter: of policy `group` (default: the one kept for this model, calibrated first if there is none).
        Raises:
          PlanError: the plan does not fit the model. TierError, UsageError: a tier has no room or no right.
        """
        if plan.dtype != model.dtype:
            raise UsageError(
                f"the plan is for {plan.dtype}, the model is in {model.dtype}; load it with dtype {plan.dtype}"
            )
        self.model, self.plan = model, plan
        plan.validate(model.geometry)
        self.params = jax.tree.map(jax.device_put, model.params)
        self.program = compile_program(plan, model.geometry, sampling)
        if plan.policy == "group" and adapter is None:
            adapter, _ = ensure_adapter(model, place_tokens=plan.place_tokens)
        self._cache = make_cache(
            self.program,
            fingerprint=model.fingerprint,
            store_dir=store_dir or default_store_dir(),
            disk_limit=disk_limit,
            adapter=adapter,
            layers=self.params["layers"],
        )
        self._generation: Generation | None = None
        self._closed = False
        self._allocate_state()

    def _allocate_state(self) -> None:
        """The buffers that graphs hand on from step to step: new at the start, and after a step that failed
        between taking one and giving it back."""
        plan, b, g = self.plan, self.plan.batch, self.model.geometry
        self._x = zeros((b, g.hidden), plan.dtype)
        self._tokens, self._lengths = zeros((b,), "int32"), zeros((b,), "int32")
        self._logits = zeros((b, g.vocab), "float32")
        self._advance, self._forced = zeros((b,), "int32"), zeros((b,), "int32")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees every tier, even where ending the generation raises; harmless when repeated.

        Raises:
          TierError: a write of the generation had failed.
        """
        self._closed = True
        try:
            if self._generation is not None:
                self._generation.close()
        finally:
            self._cache.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling = GREEDY,
        ignore_eos: bool = False,
        return_logits: bool = False,
        forced: Sequence[Sequence[int]] | None = None,
        on_prefill: PrefillProgress | None = None,
        prefilled: Prefilled | None = None,
    ) -> Generation:
        """Starts a generation: an iterator of `Step`s, whose first one does the prefill.

        Args:
          prompts: token ids of each row, `plan.batch` of them, of any lengths.
          max_new_tokens: most tokens per row; rows also end at the model's end-of-text tokens.
          forced: per row, the tokens to take whatever the logits say (teacher forcing), at least
            `max_new_tokens` of them.
          prefilled: take the prompts' keys and values from here instead of computing them: `capture` keeps
            computed ones for several engines, `RandomPrefill` makes them up.
        Raises:
          UsageError: a prompt is empty, holds an unknown id, or does not fit the plan's context; `prefilled` is
            of other prompts; or the engine is closed.
        """
        if self._closed:
            raise UsageError("the engine is closed; make a new one")
        if self._generation is not None:
            self._generation.close()
        self._check(prompts, max_new_tokens, forced)
        if prefilled is not None:
            prefilled.check(self.model, prompts)
        self.program.prepare_head(sampling)
        self._generation = Generation(
            self,
            [list(p) for p in prompts],
            max_new_tokens,
            sampling,
            frozenset() if ignore_eos else self.model.eos_token_ids,
            return_logits,
            forced,
            on_prefill,
            prefilled,
        )
        return self._generation

    def _check(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, forced: Sequence[Sequence[int]] | None
    ) -> None:
        plan, vocab = self.plan, self.model.geometry.vocab
        if len(prompts) != plan.batch:
            raise UsageError(f"{len(prompts)} prompts for a plan of {plan.batch} rows; give {plan.batch}")
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
        if forced is not None and (len(forced) != len(prompts) or min(map(len, forced)) < max_new_tokens):
            raise UsageError(f"forced needs {max_new_tokens} tokens for each of {len(prompts)} rows")
        for row, tokens in enumerate(forced or ()):
            if not all(0 <= token < vocab for token in tokens):
                raise UsageError(f"forced tokens of row {row + 1} are outside 0 to {vocab - 1}")
        check_prompts(prompts, vocab)
        for row, prompt in enumerate(prompts):
            if len(prompt) + max_new_tokens > plan.max_context:
                raise UsageError(
                    f"prompt {row + 1} has {len(prompt)} tokens: with {max_new_tokens} new ones that is over "
                    f"the limit of {plan.max_context}; shorten it, lower --max-new-tokens, or raise "
                    f"--max-context (this model's own limit is {self.model.geometry.context_limit})"
                )

    @property
    def use(self) -> CacheUse:
        """Bytes held and moved by the cache so far."""
        return self._cache.use

    def _assign(self, name: str, values: np.ndarray) -> None:
        """Sets an int32 [B] device buffer, which keeps its address."""
        setattr(self, f"_{name}", self.program.assign(getattr(self, f"_{name}"), values.astype(np.int32)))

    def addresses(self) -> dict[str, int]:
        """Addresses of the device buffers that graphs read or write in decode, weights left out. (A layer that
        arrives over transport `copy` lands elsewhere first; the slot it moves into is what counts.)"""
        names = ("x", "tokens", "lengths", "logits", "advance", "forced")
        state = {name: getattr(self, f"_{name}") for name in names}
        return {
            **{name: array.unsafe_buffer_pointer() for name, array in state.items()},
            **self._cache.addresses(),
        }


class Generation:
    """The tokens of one batch of prompts, made as they are asked for.

    Attributes:
      finish_reasons: per row "stop" (end-of-text token), "length", what `finish_row` was given, or None
        while the row goes on.
      ttft_s: seconds from the first `next()` to the first token. step_s: seconds of each later step.
      compiles_during_decode: graphs compiled after the first token. Always 0.
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
            if self._prefilled is None:
                self._prefill()
            else:
                self._take_prefilled(self._prefilled)
            self._engine._assign("lengths", self._held)
            self._engine._assign("forced", np.full(len(self._prompts), -1))
            self._cache.start()
            self._launch_head(np.zeros_like(self._active))
            step = self._collect()
            self.ttft_s = time.perf_counter() - started
            yield step
            compiled = compiles()
            while self._active.any():
                started = time.perf_counter()
                with jax.no_tracing(True):
                    step = self._step()
                self.step_s.append(time.perf_counter() - started)
                self.compiles_during_decode = compiles() - compiled
                yield step
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
        for row, prompt in enumerate(self._prompts):
            hidden = program.embed_prompt(engine.params["embed"], prompt)
            for layer, params in enumerate(layers):
                k, v = self._cache.slot(layer)
                at = row if k.shape[0] > 1 else 0
                hidden, k, v = program.prefill_layer(params, hidden, k, v, at, len(prompt))
                self._cache.filled(layer, row, len(prompt), k, v)
                if self._on_prefill is not None:
                    jax.block_until_ready(hidden[-1])  # progress that is true
                    self._on_prefill(row * len(layers) + layer + 1, total)
            start, size = program.chunks(len(prompt))[-1]
            last = scalar(len(prompt) - 1 - start)
            engine._x = program.take[size](engine._x, hidden[-1], scalar(row), last)

    def _take_prefilled(self, source: Prefilled) -> None:
        """What the source has takes the ordinary way into the cache and its tiers."""
        engine, program = self._engine, self._engine.program
        layers = len(engine.params["layers"])
        total = layers * len(self._prompts)
        size = min(program.take)
        for row, prompt in enumerate(self._prompts):
            for layer in range(layers):
                k, v = self._cache.slot(layer)
                at = row if k.shape[0] > 1 else 0
                k_row, v_row = source.kv(row, layer)
                k, v = write_row(k, k_row, at), write_row(v, v_row, at)
                self._cache.filled(layer, row, len(prompt), k, v)
                if self._on_prefill is not None:
                    self._on_prefill(row * layers + layer + 1, total)
            last = np.zeros((size, self._engine.model.geometry.hidden), engine._x.dtype)
            last[0] = source.hidden(row)
            engine._x = program.take[size](engine._x, last, scalar(row), scalar(0))

    def _step(self) -> Step:
        engine = self._engine
        active = self._active.copy()
        engine._x = self._cache.step(engine.params["layers"], engine._x, engine._lengths, self._held, active)
        self._launch_head(active)
        self._cache.settle(self._held, active)
        self._held = self._held + active
        return self._collect()

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
