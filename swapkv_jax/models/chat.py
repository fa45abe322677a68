"""Rendering a model's chat template for one user message."""

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


def render_chat(template: str, text: str, special_tokens: Mapping[str, str]) -> str:
    """The prompt for `text` as the user's message, up to where the assistant answers.

    `special_tokens` are passed by name (`bos_token`, `eos_token`, …). Raises UsageError with the template's
    complaint when it cannot be rendered.
    """
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
            messages=[{"role": "user", "content": text}],
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
