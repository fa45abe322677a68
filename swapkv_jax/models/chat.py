"""Rendering a model's chat template: a first user message, or one more turn of a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import minijinja

from swapkv_jax.errors import UsageError

# `{% generation %}` marks a training mask in Hugging Face's templates and renders nothing of its own.
_GENERATION_TAG = re.compile(r"{%([-+]?)\s*(end)?generation\s*([-+]?)%}")


_ANSWER = "\ue000"  # of the private use area: stands for an earlier answer and occurs in no template


def render_chat(template: str, text: str, special_tokens: Mapping[str, str]) -> str:
    """The prompt for `text` as the user's message, up to where the assistant answers.

    `special_tokens` are passed by name (`bos_token`, `eos_token`, …). Raises UsageError with the template's
    complaint when it cannot be rendered.
    """
    return _render(template, [{"role": "user", "content": text}], special_tokens)


def render_turn(template: str, text: str, special_tokens: Mapping[str, str]) -> str:
    """What follows an earlier answer of the assistant in a conversation that `text`, the user's message, continues:
    the end of that answer's turn, the user's turn, and the beginning of the next answer.

    Raises UsageError if the template fails, or does not show an earlier answer just once.
    """
    turns = [("user", "."), ("assistant", _ANSWER), ("user", text)]
    messages = [{"role": role, "content": content} for role, content in turns]
    _, *after = _render(template, messages, special_tokens).split(_ANSWER)
    if len(after) != 1:
        raise UsageError(
            "the model's chat template does not show an earlier answer as it was, so that no conversation can be "
            "continued with it; use --raw"
        )
    return after[0]


def _render(template: str, messages: list[dict[str, str]], special_tokens: Mapping[str, str]) -> str:
    environment = minijinja.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        auto_escape_callback=lambda name: False,
        globals={"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)},
        filters={"tojson": _to_json},
    )
    source = _GENERATION_TAG.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", template)
    try:
        return environment.render_str(
            source,
            messages=messages,
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **special_tokens,
        )
    except (minijinja.TemplateError, _ChatTemplateRefusal) as error:
        first_line = str(error).splitlines()[0]
        raise UsageError(f"the model's chat template failed ({first_line}); use --raw") from error


class _ChatTemplateRefusal(Exception):
    """A template called `raise_exception`."""


def _raise(message: str) -> None:
    raise _ChatTemplateRefusal(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    # The engine's own filter escapes <, > and & for HTML, which a prompt must not be.
    return json.dumps(value, ensure_ascii=bool(options.get("ensure_ascii", False)), indent=indent)
