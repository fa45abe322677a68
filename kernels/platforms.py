"""Which platform a computation is lowered for, and refusing the others by name.

A kernel cannot know its platform when it is traced: the same trace may be lowered for a device that is not
attached. So the check is an operation of the traced program, that every platform but one refuses to lower.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from swapkv_jax.errors import UsageError

KernelPlatform = Literal["tpu", "cuda"]


def require_platform(x: jax.Array, platform: KernelPlatform, backend: str) -> jax.Array:
    """Returns `x`; lowering the program for another platform than `platform` raises UsageError.

    Args:
      x: any operand of the kernel: the check is part of the program as long as its result is used.
      backend: the kernel's name as the user wrote it, for the message.
    """
    return _GUARDS[platform].bind(x, backend=backend)


def _guard(platform: KernelPlatform) -> Primitive:
    guard = Primitive(f"require_{platform}")
    guard.def_abstract_eval(lambda x, *, backend: x)
    mlir.register_lowering(guard, lambda ctx, x, *, backend: [x], platform=platform)

    def refuse(ctx: Any, x: Any, *, backend: str) -> NoReturn:
        found = "/".join(name for name in ctx.module_context.platforms if name != platform)
        raise UsageError(
            f"backend {backend!r} runs on {platform}, not on {found}: use 'xla' or 'auto', or interpret=True in tests"
        )

    mlir.register_lowering(guard, refuse)
    return guard


_GUARDS: dict[KernelPlatform, Primitive] = {"tpu": _guard("tpu"), "cuda": _guard("cuda")}
