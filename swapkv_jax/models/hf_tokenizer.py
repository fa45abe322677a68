"""The tokenizer of a Hugging Face directory: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import tokenizers

from swapkv_jax.errors import ModelError
from swapkv_jax.models.tokenizer import Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; an absent file is an empty one. Raises ModelError if it is not valid."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot read it as JSON ({error}); download it again") from error
    if not isinstance(record, dict):
        raise ModelError(f"{path}: holds no JSON object; download it again")
    return record


def load_hf_tokenizer(directory: Path, vocab: int) -> Tokenizer:
    """The tokenizer of `directory`, as Hugging Face's AutoTokenizer would build it.

    tokenizer.json decides whether BOS is added. Raises ModelError when it is missing or malformed.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path}: missing; create it with transformers: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for whatever it cannot parse
        raise ModelError(f"{path}: cannot load the tokenizer ({error}); download it again") from error
    config = read_json(directory / "tokenizer_config.json")
    named = read_json(directory / "special_tokens_map.json") | config
    special = {name: _content(named[name]) for name in _NAMED if named.get(name)}
    _add_tokens(backend, config, special, path)
    tokenizer = Tokenizer(
        backend, vocab=vocab, special_tokens=special, chat_template=_chat_template(directory, config)
    )
    _warn_about_bos(tokenizer, backend, config, path)
    return tokenizer


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _added_token(record: dict[str, Any]) -> tokenizers.AddedToken:
    flags = {
        key: bool(record[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in record
    }
    return tokenizers.AddedToken(record["content"], special=bool(record.get("special", False)), **flags)


def _add_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str], path: Path
) -> None:
    """Tokens that only tokenizer_config.json declares are recognised in text as well."""
    present = backend.get_added_tokens_decoder()
    declared: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {}
    for key in sorted(declared, key=int):
        token = _added_token(declared[key])
        if present.get(int(key)) == token:
            continue
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != int(key):
            raise ModelError(
                f"{path}: token {token.content!r} is {backend.token_to_id(token.content)} here and {key} in "
                "tokenizer_config.json; take both files from the same checkpoint"
            )
    extra = [*(config.get("additional_special_tokens") or []), *(config.get("extra_special_tokens") or [])]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for content in (*special.values(), *map(_content, extra)):
        if content not in known:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot read the chat template ({error}); download it again") from error
    template = config.get("chat_template")
    if not isinstance(template, str | list | None):
        raise ModelError(f"{directory}: chat_template is {template!r}; it must be a template's text")
    if isinstance(template, list):
        by_name = {entry["name"]: entry["template"] for entry in template}
        return by_name.get("default")
    return template


def _warn_about_bos(
    tokenizer: Tokenizer, backend: tokenizers.Tokenizer, config: dict[str, Any], path: Path
) -> None:
    wanted, bos = config.get("add_bos_token"), tokenizer.bos_token
    if not isinstance(wanted, bool) or bos is None:
        return
    ids = backend.encode("a", add_special_tokens=True).ids
    if (ids[:1] == [tokenizer.id_of(bos)]) != wanted:
        warnings.warn(
            f"{path} and tokenizer_config.json (add_bos_token: {str(wanted).lower()}) disagree about BOS; "
            "following tokenizer.json, as transformers 5 does",
            RuntimeWarning,
            stacklevel=2,
        )
