"""What a model fixes: its shapes, biases, norms and rotary embedding. No JAX, no files."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from swapkv_jax.errors import ModelError

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeKind = Literal["linear", "dynamic", "llama3", "yarn"]

ARCHITECTURES: tuple[str, ...] = get_args(Architecture)
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies differ from `theta ** (-2i / head_dim)`. Parameters of other kinds are None.

    `linear`: `factor`. `dynamic`: `factor`, growing from `original_max_positions`. `llama3`: `factor`,
    `low_freq_factor`, `high_freq_factor`, `original_max_positions`. `yarn`: `factor`,
    `original_max_positions`, `beta_fast`, `beta_slow`, `truncate` and, when the checkpoint gives them,
    `attention_factor` or `mscale` with `mscale_all_dim`.

    `factors` [head_dim / 2] are divisors of the frequencies that a GGUF carries as `rope_freqs.weight`;
    they apply on top of the kind (a GGUF with nothing else is `linear` with factor 1).
    """

    kind: RopeKind
    factor: float
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ModelError(
                f"rope scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
            )
        if not self.factor > 0:
            raise ModelError(f"rope scaling {self.kind!r} has factor {self.factor}; it must be positive")
        required = {
            "linear": (),
            "dynamic": ("original_max_positions",),
            "llama3": ("low_freq_factor", "high_freq_factor", "original_max_positions"),
            "yarn": ("original_max_positions", "beta_fast", "beta_slow", "truncate"),
        }[self.kind]
        for name in required:
            if getattr(self, name) is None:
                raise ModelError(f"rope scaling {self.kind!r} lacks {name}")
        if self.original_max_positions is not None and self.original_max_positions <= 0:
            raise ModelError(f"rope scaling has original_max_positions {self.original_max_positions}")
        if self.kind == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ModelError(
                f"rope scaling 'llama3' has equal low and high_freq_factor {self.low_freq_factor}"
            )
        if self.factors is not None and not all(f > 0 for f in self.factors):
            raise ModelError("rope scaling factors must all be positive")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shapes and switches of a decoder with RMSNorm and a SiLU-gated MLP.

    `max_positions` is the checkpoint's own figure; `context_limit` what its rotary scaling stretches it
    to. `qkv_bias`, `o_bias`, `mlp_bias` say which projections carry biases, `qk_norm` whether queries and
    keys are normalised per head before RoPE, `tied` whether the output head is the embedding.
    Raises ModelError when the numbers cannot belong together.
    """

    architecture: Architecture
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ModelError(
                f"architecture {self.architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        sizes = "layers hidden heads kv_heads head_dim intermediate vocab max_positions"
        for name in (*sizes.split(), "norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.layers > 65536:
            raise ModelError(f"layers is {self.layers}; at most 65536 are supported")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} query heads do not divide among {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "dynamic" and self.head_dim < 4:
            raise ModelError(f"head_dim is {self.head_dim}; dynamic rope scaling needs at least 4")
        if scaling is not None and scaling.factors is not None and len(scaling.factors) != self.head_dim // 2:
            raise ModelError(
                f"{len(scaling.factors)} rope factors for head_dim {self.head_dim}; need half as many"
            )

    @property
    def query_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def kv_values_per_token(self) -> int:
        """Numbers of K and V that one token leaves behind over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V per token over all layers, for values of `itemsize` bytes."""
        return self.kv_values_per_token * itemsize

    @property
    def context_limit(self) -> int:
        """Longest sequence the positions are meant for.

        `linear` and `dynamic` checkpoints state the length before scaling, so the factor multiplies it;
        `yarn` ones may state either, so the larger counts; `llama3` ones state the scaled length.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.kind == "llama3":
            return self.max_positions
        if scaling.kind == "yarn":
            assert scaling.original_max_positions is not None
            return max(self.max_positions, int(scaling.original_max_positions * scaling.factor))
        return max(self.max_positions, int(self.max_positions * scaling.factor))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict; `from_dict` gives back an equal Geometry."""
        record = dataclasses.asdict(self)
        if self.rope_scaling is not None and self.rope_scaling.factors is not None:
            record["rope_scaling"]["factors"] = list(self.rope_scaling.factors)
        return record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Geometry:
        """Inverse of `to_dict`. Raises ModelError on unknown, missing or contradictory fields."""
        fields = dict(record)
        scaling = fields.get("rope_scaling")
        if scaling is not None:
            scaling = dict(scaling)
            if scaling.get("factors") is not None:
                scaling["factors"] = tuple(scaling["factors"])
            fields["rope_scaling"] = _build(RopeScaling, scaling)
        return _build(cls, fields)


def _build(cls: type, fields: dict[str, Any]) -> Any:
    known = {f.name: f for f in dataclasses.fields(cls)}
    if unknown := sorted(fields.keys() - known.keys()):
        raise ModelError(f"{cls.__name__} has no field {', '.join(unknown)}; it has: {', '.join(known)}")
    required = {name for name, f in known.items() if f.default is dataclasses.MISSING}
    if missing := sorted(required - fields.keys()):
        raise ModelError(f"{cls.__name__} needs the field {', '.join(missing)}")
    return cls(**fields)
