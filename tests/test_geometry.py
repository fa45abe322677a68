"""Geometry and RoPE against Hugging Face, and every configuration that must be refused."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_config

from swapkv_jax.errors import ModelError
from swapkv_jax.models import Geometry, RopeScaling, geometry_from_hf_config
from swapkv_jax.models.rope import attention_scaling, dynamic_base, frequencies_of_base, inv_freq

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def geometry(**overrides: Any) -> Geometry:
    return geometry_from_hf_config({**BASE, **overrides})


def yarn(**overrides: Any) -> dict[str, Any]:
    return {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", **overrides}}


# inv_freq of transformers 5.24's LlamaRotaryEmbedding at these dimensions, and its attention_scaling.
DIMENSIONS = [1, 9, 16, 23, 31]
HF_ROPE: list[tuple[dict[str, Any], list[float], float]] = [
    ({"rope_theta": 10000.0}, [0.7498942, 0.074989416, 0.0099999998, 0.0013335214, 0.00013335215], 1.0),
    ({}, [0.7498942, 0.074989416, 0.0099999998, 0.0013335214, 0.00013335215], 1.0),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
        [0.7131111, 0.047688615, 0.004472136, 0.00041938733, 2.8046121e-05],
        1.0,
    ),
    (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
        [0.18747355, 0.018747354, 0.0024999999, 0.00033338036, 3.3338038e-05],
        1.0,
    ),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e6}},
        [0.25975266, 0.0082141003, 0.00040000002, 1.9478703e-05, 6.1597063e-07],
        1.0,
    ),
    (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 7e4}},
        [0.35282609, 0.02169133, 0.0018898223, 0.00016464775, 1.0122349e-05],
        1.0,
    ),
    (
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}},
        [0.66360128, 0.024955409, 0.00052484602, 1.0017869e-05, 3.7673226e-07],
        1.0,
    ),
    (
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        [0.66360128, 0.024955409, 0.00017677668, 1.0017869e-05, 3.7673226e-07],
        1.0,
    ),
    (yarn(factor=4.0), [0.7498942, 0.074989416, 0.0065384619, 0.00033338036, 3.3338038e-05], 1.138629436),
    (
        {**yarn(factor=4.0), "original_max_position_embeddings": 1024},
        [0.7498942, 0.057684168, 0.0036538462, 0.00033338036, 3.3338038e-05],
        1.138629436,
    ),
    (
        yarn(
            factor=40.0,
            mscale=0.707,
            mscale_all_dim=1.0,
            original_max_position_embeddings=1024,
            beta_fast=16,
            beta_slow=2,
        ),
        [0.7498942, 0.065850079, 0.00025000001, 3.3338034e-05, 3.3338035e-06],
        0.9210423553,
    ),
    (
        yarn(factor=40.0, mscale=0.707, original_max_position_embeddings=1024),
        [0.7498942, 0.052492592, 0.0017499999, 3.3338034e-05, 3.3338035e-06],
        1.368887945,
    ),
    (
        yarn(factor=8.0, attention_factor=0.9, original_max_position_embeddings=512, truncate=False),
        [0.7498942, 0.04364261, 0.00125, 0.00016669018, 1.6669019e-05],
        0.9,
    ),
    (
        yarn(factor=2.0, original_max_position_embeddings=8),
        [0.3749471, 0.037494708, 0.0049999999, 0.00066676072, 6.6676075e-05],
        1.069314718,
    ),
]
# The same for dynamic scaling, factor 3 over 128 positions, at some sequence lengths.
HF_DYNAMIC = {
    1: [0.7498942, 0.074989416, 0.0099999998, 0.0013335214, 0.00013335215],
    128: [0.7498942, 0.074989416, 0.0099999998, 0.0013335214, 0.00013335215],
    129: [0.74933398, 0.07448674, 0.0098811407, 0.0013107962, 0.00013029829],
    200: [0.72635686, 0.056279529, 0.0060034487, 0.00064039975, 4.9619404e-05],
    1000: [0.67929572, 0.030798538, 0.0020556177, 0.00013720017, 6.2205077e-06],
}


@pytest.mark.parametrize(("overrides", "frequencies", "scaling"), HF_ROPE)
def test_rope_is_hugging_faces(overrides: dict[str, Any], frequencies: list[float], scaling: float) -> None:
    g = geometry(**overrides)
    ours = inv_freq(g)
    assert ours.dtype == np.float32
    assert ours.shape == (32,)
    np.testing.assert_allclose(ours[DIMENSIONS], frequencies, rtol=4e-7)
    assert attention_scaling(g) == pytest.approx(scaling, rel=1e-9)


def test_dynamic_rope_follows_each_rows_length() -> None:
    import jax
    import jax.numpy as jnp

    scaling = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 64}
    g = geometry(max_position_embeddings=128, rope_scaling=scaling)
    np.testing.assert_allclose(inv_freq(g)[DIMENSIONS], HF_DYNAMIC[1], rtol=4e-7)
    for length, expected in HF_DYNAMIC.items():
        ours = frequencies_of_base(dynamic_base(length, g), g.head_dim)
        np.testing.assert_allclose(ours[DIMENSIONS], expected, rtol=6e-7)
    lengths = jnp.asarray(list(HF_DYNAMIC), jnp.int32)
    traced = jax.jit(lambda n: frequencies_of_base(dynamic_base(n, g, jnp), g.head_dim, jnp))(lengths)
    assert traced.shape == (len(HF_DYNAMIC), 32)
    assert traced.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(traced)[:, DIMENSIONS], list(HF_DYNAMIC.values()), rtol=6e-7)


def test_gguf_factors_divide_the_frequencies() -> None:
    factors = tuple(np.linspace(1, 8, 32).tolist())
    plain = geometry()
    scaled = Geometry.from_dict(
        plain.to_dict() | {"rope_scaling": {"kind": "linear", "factor": 2.0, "factors": factors}}
    )
    np.testing.assert_allclose(
        inv_freq(scaled), inv_freq(plain) / 2 / np.asarray(factors, np.float32), rtol=1e-6
    )


def test_dynamic_base_needs_dynamic_scaling() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        dynamic_base(5, geometry())


def test_fields_of_each_architecture() -> None:
    llama = geometry(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm, llama.tied) == (
        True,
        True,
        True,
        False,
        True,
    )
    assert (llama.head_dim, llama.query_per_kv) == (64, 2)
    assert llama.kv_values_per_token == 2 * 2 * 2 * 64
    assert llama.kv_bytes_per_token(2) == 1024
    mistral = geometry(**MISTRAL, attention_bias=True, head_dim=32)
    assert (mistral.qkv_bias, mistral.o_bias, mistral.head_dim) == (False, False, 32)
    qwen2 = geometry(**QWEN2)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = geometry(**QWEN3)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


def test_defaults_are_hugging_faces() -> None:
    def without(key: str, **overrides: Any) -> Geometry:
        return geometry_from_hf_config({k: v for k, v in {**BASE, **overrides}.items() if k != key})

    assert without("num_key_value_heads").kv_heads == 4
    assert without("num_key_value_heads", **MISTRAL, num_attention_heads=8).kv_heads == 8
    assert geometry(**QWEN2, num_key_value_heads=None).kv_heads == 4
    assert without("max_position_embeddings").max_positions == 2048
    assert without("max_position_embeddings", **QWEN2).max_positions == 32_768


def test_windows_that_are_switched_off_are_accepted() -> None:
    geometry(**QWEN2, use_sliding_window=False, sliding_window=32)
    geometry(**QWEN2, use_sliding_window=True, sliding_window=32, max_window_layers=2)
    geometry(**QWEN3, layer_types=["full_attention"] * 2)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"rope_scaling": None}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16_384),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_scaling": LLAMA3}, 4096),
        (yarn(factor=4.0), 16_384),
        (yarn(factor=4.0, original_max_position_embeddings=1024), 4096),
    ],
)
def test_context_limit(overrides: dict[str, Any], expected: int) -> None:
    assert geometry(**overrides).context_limit == expected


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"model_type": "mixtral"}, "mixtral"),
        ({"model_type": None}, "None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"vision_config": {"a": 1}}, "multimodal"),
        ({**MISTRAL, "sliding_window": 4096}, "sliding window"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, "sliding window"),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"num_local_experts": 8}, "experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"final_logit_softcapping": 30.0}, "softcapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "two"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low and high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"rope_scaling": "yarn"}, "yarn"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "many"}, "many"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": 3}, "hidden_size"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"head_dim": 33}, "head_dim"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_unsupported_configurations_are_named(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as raised:
        geometry(**overrides)
    assert "\n" not in str(raised.value)


def test_a_mistral_without_the_key_has_a_window() -> None:
    config = {k: v for k, v in {**BASE, **MISTRAL}.items() if k != "sliding_window"}
    with pytest.raises(ModelError, match='"sliding_window": null'):
        geometry_from_hf_config(config)


floats = st.floats(0.25, 64.0, allow_nan=False)
scalings = st.none() | st.one_of(
    st.builds(
        RopeScaling, kind=st.just("linear"), factor=floats, factors=st.none() | st.tuples(*[floats] * 8)
    ),
    st.builds(
        RopeScaling, kind=st.just("dynamic"), factor=floats, original_max_positions=st.integers(1, 1 << 20)
    ),
    st.builds(
        RopeScaling,
        kind=st.just("yarn"),
        factor=floats,
        original_max_positions=st.integers(1, 1 << 20),
        beta_fast=floats,
        beta_slow=floats,
        truncate=st.booleans(),
        attention_factor=st.none() | floats,
    ),
)


@given(
    st.builds(
        Geometry,
        architecture=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
        layers=st.integers(1, 100),
        hidden=st.integers(1, 8192),
        heads=st.just(8),
        kv_heads=st.sampled_from([1, 2, 4, 8]),
        head_dim=st.just(16),
        intermediate=st.integers(1, 30_000),
        vocab=st.integers(1, 200_000),
        norm_eps=st.floats(1e-9, 1e-3),
        rope_theta=st.floats(100, 1e7),
        rope_scaling=scalings,
        max_positions=st.integers(1, 1 << 20),
        qkv_bias=st.booleans(),
        tied=st.booleans(),
    )
)
def test_json_round_trip(g: Geometry) -> None:
    again = Geometry.from_dict(json.loads(json.dumps(g.to_dict())))
    assert again == g
    assert hash(again) == hash(g)


def test_from_dict_refuses_unknown_and_missing_fields() -> None:
    record = geometry().to_dict()
    with pytest.raises(ModelError, match="no field experts"):
        Geometry.from_dict(record | {"experts": 8})
    with pytest.raises(ModelError, match="needs the field layers"):
        Geometry.from_dict({k: v for k, v in record.items() if k != "layers"})
    with pytest.raises(ModelError, match="no field gamma"):
        Geometry.from_dict(record | {"rope_scaling": {"kind": "linear", "factor": 2.0, "gamma": 1}})


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps", "rope_theta"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "many", True])
def test_numbers_that_are_none(key: str, value: object) -> None:
    config = {**tiny_config("llama"), key: value}
    with pytest.raises(ModelError, match=f"{key}=.*must be"):
        geometry_from_hf_config(config)
