"""Models: geometry, weights and tokenizers, from any supported checkpoint."""

from swapkv_jax.models.geometry import ARCHITECTURES, Geometry, RopeScaling
from swapkv_jax.models.hf_config import geometry_from_hf_config
from swapkv_jax.models.loader import Model, ModelSource, load_model, open_model
from swapkv_jax.models.tokenizer import StreamDecoder, Tokenizer
from swapkv_jax.models.weights import DTYPES, LayerWeights, Progress, Weights

__all__ = [
    "ARCHITECTURES",
    "DTYPES",
    "Geometry",
    "LayerWeights",
    "Model",
    "ModelSource",
    "Progress",
    "RopeScaling",
    "StreamDecoder",
    "Tokenizer",
    "Weights",
    "geometry_from_hf_config",
    "load_model",
    "open_model",
]
