"""Attention over selected slots of a pool of groups, and over the rolling buffer."""

from .api import BACKENDS, Backend, gather_attention

__all__ = ["BACKENDS", "Backend", "gather_attention"]
