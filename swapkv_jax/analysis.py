"""What a model's KV cache takes, and how far memory and the link to it reach (SwapKV's input length analysis).

Numbers only: no model, no device, no JAX. Sizes are bytes, rates bytes per second, times seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from swapkv_jax.errors import UsageError

KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}  # per value
# What one plan may be asked for at most; it is refused above them too.
_MOST_ROWS, _MOST_CONTEXT, _MOST_GROUP = 65536, 1 << 30, 65536
_SUMMARY_BYTES = 2  # KVSwap keeps low-rank keys in 16 bits, whatever the KV's own type


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked about. None is unknown, and so is then what depends on it.

    Attributes:
      layers, kv_heads, head_dim: of the model.
      context, batch: a request is `batch` rows of `context` tokens each.
      kv_dtype: one of `KV_BYTES`.
      physical_layers: layers whose KV has room on the device under policy `layer`.
      device_memory, weights: bytes; what remains beside the weights is for KV.
      weights_read: bytes of the weights that a step reads (an embedding's table is not read whole).
      transfer: bytes/s at which layers reach the device, from DRAM or from disk.
      memory: bytes/s that the device reads from its own memory.
      tpot: seconds per step that the device computes; None: what reading the weights and all KV takes it.
      sigma, group_tokens, reuse_tokens: of policy `group`, σ = Hkv·D/r, G and C·G. KVSwap's own figures are σ 8
        (relaxed) or 32 (tight), G 4 or 8, and 400 tokens.
    Raises:
      UsageError: a number below 1, or beyond what the model, the context or a plan has.
    """

    layers: int
    kv_heads: int
    head_dim: int
    context: int
    batch: int = 1
    kv_dtype: str = "bfloat16"
    physical_layers: int
    device_memory: int | None = None
    weights: int | None = None
    weights_read: int | None = None
    transfer: float | None = None
    memory: float | None = None
    tpot: float | None = None
    sigma: int
    group_tokens: int
    reuse_tokens: int

    def __post_init__(self) -> None:
        if self.kv_dtype not in KV_BYTES:
            raise UsageError(f"--kv-dtype {self.kv_dtype!r} is not one of {', '.join(KV_BYTES)}")
        slots, group = min(2, self.layers), min(self.context, _MOST_GROUP)
        bounds = {
            "context": (1, _MOST_CONTEXT, "no plan goes further"),
            "batch": (1, _MOST_ROWS, "no plan goes further"),
            "sigma": (1, self.kv_heads * self.head_dim, "no more than Hkv·D"),
            "group_tokens": (1, group, f"no more than the context or {_MOST_GROUP:,}"),
            "reuse_tokens": (1, self.context, "no more than the context"),
            "physical_layers": (
                slots,
                self.layers,
                "one computes while the next arrives, and no more than all",
            ),
        }
        for name, (least, most, why) in bounds.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise UsageError(
                    f"--{name.replace('_', '-')} must be {least} to {most:,} ({why}), not {value}; leave it out for "
                    "the usual"
                )

    @property
    def rank(self) -> int:
        """r of the summary."""
        return max(1, self.kv_heads * self.head_dim // self.sigma)


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The answers. Tokens are those of all rows together; None is unknown.

    Attributes:
      kv_bytes_per_token: K and V of all layers.
      tokens_resident: tokens whose KV fits beside the weights. tokens_layer: with `physical_layers` of it there.
      tokens_transfer_limit: tokens whose KV travels to the device in the time of one step; None too where it
        always does.
      requests_resident, requests_layer: requests whose KV, or slots, fit beside the weights.
      layer_slot_bytes: of one request under policy `layer`.
      summary_bytes, reuse_bytes, rolling_bytes: of one request under policy `group`: low-rank keys of every token,
        kept groups, and the newest tokens that are no group yet.
      full_kv_bytes: all KV of one request.
      predicted_overhead: how much longer a step of policy `layer` takes than one with all KV on the device, in
        parts of it: 0.3 is 30 %.
    """

    kv_bytes_per_token: int
    tokens_resident: int | None
    tokens_layer: int | None
    tokens_transfer_limit: int | None
    requests_resident: int | None
    requests_layer: int | None
    layer_slot_bytes: int
    summary_bytes: int
    reuse_bytes: int
    rolling_bytes: int
    full_kv_bytes: int
    predicted_overhead: float | None


def analyse(q: Question) -> Analysis:
    """Answers a question."""
    layer_token = (
        2 * q.kv_heads * q.head_dim * KV_BYTES[q.kv_dtype]
    )  # bytes of one layer's K and V of one token
    tokens = q.batch * q.context
    full = q.layers * layer_token * tokens
    slots = q.physical_layers * layer_token * tokens
    room = None
    if q.device_memory is not None and q.weights is not None:
        room = max(0, q.device_memory - q.weights)
    step = step_seconds(q)
    return Analysis(
        kv_bytes_per_token=q.layers * layer_token,
        tokens_resident=None if room is None else room // (q.layers * layer_token),
        tokens_layer=None if room is None else room // (q.physical_layers * layer_token),
        tokens_transfer_limit=_transfer_limit(q, q.layers * layer_token),
        requests_resident=None if room is None else room // full,
        requests_layer=None if room is None else room // slots,
        layer_slot_bytes=slots,
        summary_bytes=q.layers * tokens * q.rank * _SUMMARY_BYTES,
        reuse_bytes=q.layers * q.batch * q.reuse_tokens * layer_token,
        rolling_bytes=q.layers * q.batch * q.group_tokens * layer_token,
        full_kv_bytes=full,
        predicted_overhead=None
        if step is None or q.transfer is None
        else max(0.0, full / q.transfer / step - 1),
    )


def step_seconds(q: Question) -> float | None:
    """Seconds that the device computes in one step with all KV on it: what was given, else the least it takes to read
    the weights and all KV; None: unknown."""
    if q.tpot is not None:
        return q.tpot
    if q.memory is None or q.weights is None:
        return None
    kv = 2 * q.layers * q.kv_heads * q.head_dim * KV_BYTES[q.kv_dtype] * q.batch * q.context
    return (_read(q.weights, q) + kv) / q.memory


def _read(weights: int, q: Question) -> int:
    return weights if q.weights_read is None else q.weights_read


def _transfer_limit(q: Question, token_bytes: int) -> int | None:
    if q.transfer is None:
        return None
    if q.tpot is not None:
        return int(q.transfer * q.tpot / token_bytes)
    if q.memory is None or q.weights is None or q.memory <= q.transfer:
        return None
    # A step that reads more KV takes longer too: tokens·kv/transfer = (weights + tokens·kv)/memory.
    return int(_read(q.weights, q) / q.memory / (token_bytes / q.transfer - token_bytes / q.memory))
