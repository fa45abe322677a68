"""Fetching a Hugging Face hub id into the hub library's own cache."""

from __future__ import annotations

from pathlib import Path

from swapkv_jax.errors import ModelError
from swapkv_jax.models.embedded import EMBEDDED_NAME
from swapkv_jax.models.weights import Progress

_PATTERNS = ["*.json", "*.jinja", "*.safetensors"]


def fetch_from_hub(model_id: str, progress: Progress | None = None) -> Path:
    """The local directory of `model_id` ("org/name"), downloaded unless it is in the hub cache.

    Raises ModelError naming the id and the remedy when it cannot be had.
    """
    # Imported here: it costs a third of a second, and most models are local.
    import huggingface_hub

    if progress is not None:
        progress(f"fetching {model_id}", 0, 0)
    try:
        return Path(huggingface_hub.snapshot_download(model_id, allow_patterns=_PATTERNS))
    except Exception as error:  # HTTP client, OS and hub errors share no base class across its releases
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            f"{model_id}: no such local path, and the hub did not provide it "
            f"({type(error).__name__}: {reason}); check the id and the network, "
            f"or pass a local directory, a GGUF file, or {EMBEDDED_NAME}"
        ) from error
