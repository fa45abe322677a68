"""Durable sessions: conversations whose keys and values outlive the process, on disk, for every cache policy."""

from swapkv_jax.sessions.aes_gcm import AesGcm
from swapkv_jax.sessions.identity import FORMAT_VERSION, Identity
from swapkv_jax.sessions.info import SessionInfo
from swapkv_jax.sessions.layout import SESSION_GROUP
from swapkv_jax.sessions.session import Durability, Session
from swapkv_jax.sessions.store import SessionStore

__all__ = [
    "FORMAT_VERSION",
    "SESSION_GROUP",
    "AesGcm",
    "Durability",
    "Identity",
    "Session",
    "SessionInfo",
    "SessionStore",
]
