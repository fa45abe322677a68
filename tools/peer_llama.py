"""llama.cpp as a peer, through llama-cpp-python, on the CPU: a row is a sequence of one context, with a stream of its
own. Weights in float32 with keys and values in float32, and in Q4_1 with float16; flash attention off and on."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import machine
import numpy as np
from gguf_out import Kind, in_pairs, rotates_pairs, write_gguf
from llama_state import SequenceState
from peers import PeerUnavailable, Setting, check_translatable

from swapkv_jax.models import Geometry, Model
from swapkv_jax.prefilled import Prefilled

CHUNK = 512  # prompt tokens per call, llama.cpp's own default
_PAD = 256  # what it rounds a row's tokens up to
_KV = {"F32": np.dtype(np.float32), "Q4_1": np.dtype(np.float16)}
_GGML_TYPE = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}
_PRECISION = {"F32": "float32", "Q4_1": "Q4_1"}


class LlamaCpp:
    """A `Peer`. One loaded model per kind of weights serves every context."""

    def __init__(self, model: Model, scratch: Path):
        """See `Peer`; `scratch` gets the weights as GGUF files, which are mapped until `close`."""
        try:
            self._lib: Any = importlib.import_module("llama_cpp")
        except ImportError:
            raise PeerUnavailable('not installed; pip install "swapkv-jax[llama-cpp]"') from None
        except (OSError, RuntimeError) as error:
            raise PeerUnavailable(f"its library does not load: {error}") from None
        if not hasattr(self._lib, "LLAMA_FLASH_ATTN_TYPE_ENABLED"):
            raise PeerUnavailable(f"version {self._lib.__version__}; pip install 'llama-cpp-python>=0.3.17'")
        check_translatable(model)
        self.version = f"llama-cpp-python {self._lib.__version__}"
        self.skipped: dict[str, str] = {}
        self._geometry = model.geometry
        self._silence()
        self._models: dict[str, Any] = {}
        self._settings: dict[Setting, tuple[str, bool]] = {}
        for kind, kv_dtype in _KV.items():
            path = scratch / f"{kind}.gguf"
            try:
                weight_bytes = write_gguf(model, path, cast(Kind, kind))
            except OSError as error:
                raise PeerUnavailable(f"its weights cannot be written to {path}: {error.strerror}") from None
            self._models[kind] = self._load(path)
            for flash in (False, True):
                setting = Setting(
                    name=f"{kind}, flash attention {'on' if flash else 'off'}",
                    precision=_PRECISION[kind],
                    kv_dtype=kv_dtype.name,
                    weight_bytes=weight_bytes,
                    token_bytes=model.geometry.kv_bytes_per_token(kv_dtype.itemsize),
                )
                self._settings[setting] = (kind, flash)
        self.settings = tuple(self._settings)

    def _silence(self) -> None:
        """Nothing of its log but what becomes an error here."""
        self._log = self._lib.llama_log_callback(lambda level, text, data: None)  # kept alive
        self._lib.llama_log_set(self._log, ctypes.c_void_p(0))

    def _load(self, path: Path) -> Any:
        parameters = self._lib.llama_model_default_params()
        parameters.n_gpu_layers = 0
        model = self._lib.llama_model_load_from_file(bytes(path), parameters)
        if not model:
            raise PeerUnavailable(f"it does not load {path.name}, which was written for it")
        return model

    def open(self, setting: Setting, batch: int, capacity: int) -> LlamaRun:
        kind, flash = self._settings[setting]
        return LlamaRun(self._lib, self._models[kind], self._geometry, _KV[kind], flash, batch, capacity)

    def close(self) -> None:
        for model in self._models.values():
            self._lib.llama_model_free(model)
        self._models.clear()


class LlamaRun:
    """A `PeerRun`: a context with a sequence per row."""

    def __init__(
        self,
        lib: Any,
        model: Any,
        geometry: Geometry,
        kv_dtype: np.dtype,
        flash: bool,
        batch: int,
        capacity: int,
    ):
        self._lib, self._geometry = lib, geometry
        self._held = [0] * batch
        self._row_tokens = -(-capacity // _PAD) * _PAD
        parameters = lib.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = self._row_tokens * batch, batch
        parameters.n_batch = parameters.n_ubatch = max(CHUNK, batch)
        parameters.n_threads = parameters.n_threads_batch = machine.cores()
        parameters.type_k = parameters.type_v = _GGML_TYPE[kv_dtype]
        name = f"LLAMA_FLASH_ATTN_TYPE_{'ENABLED' if flash else 'DISABLED'}"
        parameters.flash_attn_type = getattr(lib, name)
        parameters.kv_unified = parameters.offload_kqv = parameters.op_offload = False
        self._context = lib.llama_init_from_model(model, parameters)
        if not self._context:
            raise PeerUnavailable(f"it makes no context of {batch} x {self._row_tokens} tokens")
        self._batch = lib.llama_batch_init(max(CHUNK, batch), 0, 1)
        self._state = SequenceState(
            rows=batch,
            layers=geometry.layers,
            width=geometry.kv_heads * geometry.head_dim,
            dtype=kv_dtype,
            transposed=not flash,
        )

    # ---- a PeerRun -----------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        chosen = []
        for row, prompt in enumerate(prompts):
            for start in range(0, len(prompt), CHUNK):
                self._decode([(row, token) for token in prompt[start : start + CHUNK]])
            chosen += self._chosen(1)
        return chosen

    def take(self, source: Prefilled, length: int) -> None:
        headers = self._headers()
        for row, header in enumerate(headers):
            blob, ks, vs = self._state.empty(row, length, header)
            for layer, (to_k, to_v) in enumerate(zip(ks, vs, strict=True)):
                k, v = (
                    part[..., :length] if i == 0 else part[:, :length]
                    for i, part in enumerate(source.kv(row, layer))
                )
                if rotates_pairs(self._geometry):
                    k = in_pairs(k, 1)
                to_k[...] = k.reshape(-1, length).T
                by_dimension = v.swapaxes(1, 2).reshape(-1, length)
                to_v[...] = by_dimension if self._state.transposed else by_dimension.T
            if self._restore(row, blob) != len(blob):
                raise PeerUnavailable("it does not take keys and values; use --prefill real")
            self._held[row] = length

    def step(self, tokens: Sequence[int]) -> list[int]:
        self._decode(list(enumerate(tokens)), every=True)
        return self._chosen(len(tokens))

    @property
    def kv_bytes(self) -> int:
        itemsize = self._state.dtype.itemsize
        return len(self._held) * self._row_tokens * self._geometry.kv_bytes_per_token(itemsize)

    def close(self) -> None:
        if self._context:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._context)
            self._context = None

    # ---- the library ---------------------------------------------------------------------------------

    def _decode(self, tokens: Sequence[tuple[int, int]], *, every: bool = False) -> None:
        """Adds (row, token)s; logits of `every` one, else of the last."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (row, token) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self._held[row]
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
            batch.logits[i] = every or i == len(tokens) - 1
            self._held[row] += 1
        code = self._lib.llama_decode(self._context, batch)
        if code:
            raise PeerUnavailable(f"llama_decode fails with {code}")

    def _chosen(self, count: int) -> list[int]:
        """The likeliest token after each of the last `count` outputs."""
        logits = self._lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (count, self._geometry.vocab)).argmax(-1).tolist()

    def _headers(self) -> list[bytes]:
        """What a saved row begins with, from rows of two tokens; they are forgotten again.

        Raises:
          PeerUnavailable: this version saves rows in another form.
        """
        headers = []
        for row in range(len(self._held)):
            self._decode([(row, 0), (row, 0)])
            size = self._lib.llama_state_seq_get_size(self._context, row)
            blob = np.zeros(size, np.uint8)
            got = self._lib.llama_state_seq_get_data(self._context, _bytes_at(blob), size, row)
            header = self._state.header(blob[:got], row, 2)
            if header is None:
                raise PeerUnavailable("this version saves sequences in another form; use --prefill real")
            headers.append(header)
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        return headers

    def _restore(self, row: int, blob: np.ndarray) -> int:
        return self._lib.llama_state_seq_set_data(self._context, _bytes_at(blob), len(blob), row)


def _bytes_at(array: np.ndarray) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
