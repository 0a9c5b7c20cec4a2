"""Mark a part of a function that runs in float32, whatever the policy says."""

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import equinox as eqx
import jax

from halfstep._base import described

KEEP_SCOPE = "halfstep.keep_precision"
"""The named scope that marks the kept part; every transformation of JAX preserves it."""


# The mark is a named scope and not a flag: a scope is part of each operation that is traced, so
# `jit`, `grad`, `vmap`, `scan` and `jax.checkpoint` all carry it along, and a function whose trace
# JAX has cached still has it. `autocast` reads it from the operations.
class _KeptModule(eqx.Module):
    """A module whose inside is left as it is; still a pytree of its parameters."""

    module: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(KEEP_SCOPE):
            return self.module(*args, **kwargs)


@contextlib.contextmanager
def _kept() -> Generator[None, None, None]:
    with jax.named_scope(KEEP_SCOPE):
        yield


def keep_precision(func: Callable[..., Any] | None = None) -> Any:
    """Keep a function, or the body of a `with`, in the precision in which it is written.

    `autocast` does not lower the operations inside, matrix products and loops included. Results of
    16-bit operations enter as float32. Without `autocast`, `keep_precision` does nothing.

    Args:
        func: The function or Equinox module. Without it, a context manager is returned.

    Returns:
        The function, the module (a pytree with the same leaves), or the context manager.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def model(w, x):
            with halfstep.keep_precision():
                return x @ w


        @halfstep.keep_precision
        def decorated(w, x):
            return x @ w


        w, x = jnp.full((8, 8), 1 / 3), jnp.full((2, 8), 1 / 3)
        assert (halfstep.autocast(model, "bf16")(w, x) == x @ w).all()
        assert (halfstep.autocast(decorated, "bf16")(w, x) == x @ w).all()
        ```
    """
    if func is None:
        return _kept()
    if not callable(func):
        raise TypeError(
            f"`func` of `keep_precision` must be a function or a module; got {described(func)}. "
            "As a context manager, write `with keep_precision():`."
        )
    if isinstance(func, eqx.Module):
        return _KeptModule(func)

    @functools.wraps(func)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(KEEP_SCOPE):
            return func(*args, **kwargs)

    return kept
