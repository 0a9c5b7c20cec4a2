"""Every kind of leaf a user's tree can hold, one row each."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax


class Row(NamedTuple):
    """A leaf and what halfstep owes it.

    Attributes:
        make: Builds the leaf (a fresh one each time; nothing is made at import).
        cast: Whether a cast applies to it.
        inexact: Whether it counts as a number that can be non-finite.
    """

    make: Callable[[], Any]
    cast: bool = False
    inexact: bool = False


class Opaque:
    """An object no library knows."""


def _function() -> None:
    return None


ROWS: dict[str, Row] = {
    "float32": Row(lambda: jnp.ones((2, 3)), cast=True, inexact=True),
    "float16": Row(lambda: jnp.ones(3, jnp.float16), cast=True, inexact=True),
    "bfloat16": Row(lambda: jnp.ones(3, jnp.bfloat16), cast=True, inexact=True),
    "weak float32": Row(lambda: jnp.asarray(1.5), cast=True, inexact=True),
    "zero-size": Row(lambda: jnp.ones((0, 3)), cast=True, inexact=True),
    "numpy float32": Row(lambda: np.ones(3, np.float32), cast=True, inexact=True),
    "numpy bfloat16": Row(lambda: np.ones(3, ml_dtypes.bfloat16), cast=True, inexact=True),
    "numpy float64, x64 off": Row(lambda: np.ones(3), cast=True, inexact=True),
    "numpy scalar": Row(lambda: np.float32(2.0), cast=True, inexact=True),
    "abstract": Row(lambda: jax.ShapeDtypeStruct((2,), jnp.float32), cast=True),
    "float8": Row(lambda: jnp.ones(3, jnp.float8_e4m3fn), inexact=True),
    "complex": Row(lambda: jnp.ones(3, jnp.complex64) * 1j, inexact=True),
    "typed key": Row(lambda: jax.random.key(0)),
    "typed keys": Row(lambda: jax.random.split(jax.random.key(0), 3)),
    "legacy key": Row(lambda: jax.random.PRNGKey(0)),
    "int4": Row(lambda: jnp.ones(3, jnp.int4)),
    "int8": Row(lambda: jnp.ones(3, jnp.int8)),
    "int32": Row(lambda: jnp.arange(3)),
    "bool": Row(lambda: jnp.array([True, False])),
    "float0": Row(lambda: np.zeros(3, jax.dtypes.float0)),
    "Python float": Row(lambda: 1.5, inexact=True),
    "Python int": Row(lambda: 3),
    "Python bool": Row(lambda: True),
    "string": Row(lambda: "adam"),
    "function": Row(lambda: _function),
    "partial": Row(lambda: functools.partial(_function)),
    "object": Row(Opaque),
    "None": Row(lambda: None),
    "empty dict": Row(dict),
    "MaskedNode": Row(optax.MaskedNode),
}
