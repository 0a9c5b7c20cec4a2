"""Keep functions, modules and parts of functions in float32, whatever the policy says."""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator
from typing import Any, TypeVar, overload

import jax

from halfstep._base import DTypeLike, checked, described
from halfstep._policy.cast import check_target
from halfstep._policy.kept_calls import KEEP_SCOPE, full_precision_call

T = TypeVar("T")


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
    if _is_module(func):
        from halfstep._policy.modules import KeptModule

        return KeptModule(func)

    @functools.wraps(func)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(KEEP_SCOPE):
            return func(*args, **kwargs)

    return kept


@overload
def force_full_precision(
    func: Callable[..., T], return_dtype: DTypeLike | None = None
) -> Callable[..., T]: ...


@overload
def force_full_precision(
    func: None = None, return_dtype: DTypeLike | None = None
) -> Callable[[Callable[..., T]], Callable[..., T]]: ...


@checked
def force_full_precision(func: object = None, return_dtype: DTypeLike | None = None) -> Any:
    """Run a function or an Equinox module in float32, wherever it is called.

    Use it where arguments are cast, for operations that must not run in 16 bits: softmax, norms,
    sums, losses. The arguments are cast to float32, and the returned pytree is cast to
    `return_dtype`. `autocast` leaves the inside in float32, matrix products included, as with
    `keep_precision`.

    Args:
        func: The function or module. Without it a decorator is returned.
        return_dtype: The dtype to cast the results to; `None` means the dtype of the arguments, so
            a float16 model stays float16 around the function. For a loss write `"f32"`: a loss
            scale above 65504 would become infinite on its way through a float16 loss.

    Returns:
        The function; for an Equinox module, a module (and so a pytree with the same leaves).

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        @halfstep.force_full_precision
        def softmax(x):
            assert x.dtype == jnp.float32
            return jax.nn.softmax(x)


        assert softmax(jnp.ones(3, jnp.float16)).dtype == jnp.float16

        mean = halfstep.force_full_precision(jnp.mean, return_dtype="f32")
        assert mean(jnp.full(4096, 60000.0, jnp.float16)) == 60000
        ```
    """
    target = None if return_dtype is None else check_target(return_dtype)
    if func is None:
        return functools.partial(force_full_precision, return_dtype=return_dtype)
    if not callable(func):
        raise TypeError(
            "`func` of `force_full_precision` must be a function or a module; got "
            f"{described(func)}. "
            "Give the return dtype by name: @force_full_precision(return_dtype=...)."
        )
    # A module stays a module: as a plain function it would hide its parameters from optimizers.
    if _is_module(func):
        from halfstep._policy.modules import FullPrecisionModule

        return FullPrecisionModule(func, target)

    @functools.wraps(func)
    def full(*args: Any, **kwargs: Any) -> Any:
        return full_precision_call(func, target, args, kwargs)

    return full


def _is_module(func: object) -> bool:
    """Return whether a function is an Equinox module, which exists only if Equinox is imported."""
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(func, equinox.Module)
