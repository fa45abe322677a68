"""What a session's keys and values must agree with to be of any use."""

from __future__ import annotations

import msgspec

from swapkv_jax.errors import TierError

FORMAT_VERSION = 1


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that computed a session. One that differs in any field never matches.

    Attributes:
      fingerprint: of weights, dtype, RoPE and tokenizer.
      dtype: of keys and values, such as "float32" or "bfloat16".
      layers, kv_heads, head_dim: their shape.
      format_version: of how sessions are stored.
    """

    fingerprint: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Canonical: equal identities give equal text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Identity:
        """Inverse of `to_json`.

        Raises:
          TierError: it is the text of another version, or damaged.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise TierError(
                f"a session's identity is not readable ({error}); use the version that wrote it"
            ) from None

    def difference(self, other: Identity) -> str:
        """How `other` differs, for a message: "" if it does not."""
        fields = ((name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__)
        return ", ".join(f"{name} {b!r} instead of {a!r}" for name, a, b in fields if a != b)
