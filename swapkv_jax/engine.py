"""A model under a plan: compiled, allocated and ready to generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import jax
import numpy as np

from swapkv_jax.adapter import Adapter
from swapkv_jax.cache import CacheUse, make_cache
from swapkv_jax.errors import UsageError
from swapkv_jax.generation import Generation, PrefillProgress
from swapkv_jax.models import Model
from swapkv_jax.plan import Plan
from swapkv_jax.prefilled import Prefilled, check_prompts
from swapkv_jax.program import compile_program
from swapkv_jax.sampling import Sampling
from swapkv_jax.session_rows import check_sessions
from swapkv_jax.staging import zeros
from swapkv_jax.store_paths import default_store_dir
from swapkv_jax.strategies.adapters import plan_adapter
from swapkv_jax.tiers import Syscalls

GREEDY = Sampling()

if TYPE_CHECKING:
    from swapkv_jax.sessions import Session


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
        syscalls: Syscalls | None = None,
        ephemeral: bool = False,
    ):
        """Compiles the plan for `sampling` and allocates its buffers.

        Args:
          store_dir: directory of the disk store (default: in the user's cache); only tier `disk` uses it.
          disk_limit: bytes the store may take (default: what the disk has).
          adapter: of policy `group` (default: the one kept for this model, calibrated first if there is none).
          syscalls: how the disk store reaches its files (default: directly); a `ThrottledDisk` is a slower disk.
          ephemeral: the disk store's files have no name, so that nothing is left of them however this process ends.
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
            adapter, _ = plan_adapter(model, plan)
        self._cache = make_cache(
            self.program,
            fingerprint=model.fingerprint,
            store_dir=store_dir or default_store_dir(),
            disk_limit=disk_limit,
            adapter=adapter,
            layers=self.params["layers"],
            syscalls=syscalls,
            ephemeral=ephemeral,
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
        sessions: Sequence[Session | None] | None = None,
    ) -> Generation:
        """Starts a generation: an iterator of `Step`s, whose first one does the prefill.

        Args:
          prompts: token ids of each row, `plan.batch` of them, of any lengths.
          max_new_tokens: most tokens per row; rows also end at the model's end-of-text tokens.
          forced: per row, the tokens to take whatever the logits say (teacher forcing), at least
            `max_new_tokens` of them.
          prefilled: take the prompts' keys and values from here instead of computing them: `capture` keeps
            computed ones for several engines, `RandomPrefill` makes them up.
          sessions: per row the session that it continues, of this model, or None. What a row's prompt has in common
            with its session is not computed again; the session forgets the rest, and gets the row's new tokens.
            It stays open, for the caller to close.
        Raises:
          UsageError: a prompt is empty, holds an unknown id, or does not fit the plan's context; `prefilled` is
            of other prompts, or comes with `sessions`; or the engine is closed.
        """
        if self._closed:
            raise UsageError("the engine is closed; make a new one")
        if self._generation is not None:
            self._generation.close()
        self._check(prompts, max_new_tokens, forced)
        if prefilled is not None:
            prefilled.check(self.model, prompts)
        if sessions is not None:
            check_sessions(sessions, prompts, self.model)
            if prefilled is not None:
                raise UsageError("sessions bring what is prefilled themselves: leave `prefilled` out")
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
            sessions,
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
