"""What JAX does not promise and `_base/private_jax` relies on, with every JAX that is tested."""

import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import source_info_util

from halfstep._base.private_jax import is_compiling, lines_of_backward_functions

pytestmark = [pytest.mark.core, pytest.mark.types, pytest.mark.wheel]


@jax.custom_vjp
def _double(x):
    return 2 * x


def _backward(_, g):
    return (2 * g,)  # the line


_double.defvjp(lambda x: (_double(x), None), _backward)


def _functions(function):
    """Of each equation, the functions of this file that it was traced in."""
    jaxpr = jax.make_jaxpr(function)(jnp.float32(1)).jaxpr
    tracebacks: list[Any] = [equation.source_info.traceback for equation in jaxpr.eqns]
    return [{f.function_name for f in t.frames if f.file_name == __file__} for t in tracebacks]


# Where JAX itself looks it up.
MODULE = sys.modules[source_info_util.current.__module__]


def test_lines_of_backward_functions():
    before = MODULE.current
    with lines_of_backward_functions():
        inside = _functions(lambda x: jax.grad(_double)(x))
    assert any("_backward" in found for found in inside)
    assert MODULE.current is before
    # What JAX writes by itself: if this fails, it needs no help any more.
    assert not any("_backward" in found for found in _functions(lambda x: jax.grad(_double)(x)))


def test_an_error_leaves_nothing_behind():
    before = MODULE.current

    def fail():
        with lines_of_backward_functions():
            assert MODULE.current is not before
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert MODULE.current is before


def test_a_compile_shows_in_the_stack():
    thread, ended, seen = threading.get_ident(), threading.Event(), []

    def look() -> None:
        while not ended.wait(0.001):
            seen.append(is_compiling(thread))

    def large(x):
        for number in range(20):
            x = jnp.sin(x) * number + jnp.sort(x)
        return x

    lowered = jax.jit(large).lower(jnp.ones(17))
    assert not is_compiling(thread)
    watcher = threading.Thread(target=look)
    watcher.start()
    lowered.compile()
    ended.set()
    watcher.join()
    assert any(seen)
    assert not is_compiling(thread)
