"""`x - max(x)` inside of an island: in float32, in the form that each compiler stores least for.

It is one operation and not `platform_dependent`, which would trace, differentiate and lower two
branches for every softmax.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_difference = Primitive("halfstep_difference")


def difference(left: Any, right: Any, *, compute: np.dtype) -> Any:
    """Subtract in float32, except on TPU: there in the compute dtype, with a float32 result.

    XLA:TPU would write the float32 difference to memory, once for the exponential and once for its
    derivative. The operands are values of the compute dtype, so that what is lost is one rounding.
    """
    return _difference.bind(left, right, compute=compute)


def _exact(left: Any, right: Any, *, compute: np.dtype) -> Any:
    del compute
    return jax.lax.sub(left, right)


def _low(left: Any, right: Any, *, compute: np.dtype) -> Any:
    made = [jax.lax.convert_element_type(value, compute) for value in (left, right)]
    return jax.lax.convert_element_type(jax.lax.sub(*made), left.dtype)


def _abstract(left: Any, right: Any, *, compute: np.dtype) -> Any:
    del compute
    return jax.lax.sub_p.abstract_eval(left, right)[0]


def _spread(tangent: Any, left: Any, right: Any) -> Any:
    # NumPy knows no dimensions without a number, as `jax.export` has them.
    shape = jnp.broadcast_shapes(left.shape, right.shape)
    return tangent if tangent.shape == shape else jnp.broadcast_to(tangent, shape)


_difference.def_impl(_exact)
_difference.def_abstract_eval(_abstract)
ad.defjvp(
    _difference,
    lambda tangent, *primals, **_: _spread(tangent, *primals),
    lambda tangent, *primals, **_: jax.lax.neg(_spread(tangent, *primals)),
)
batching.defbroadcasting(_difference)
mlir.register_lowering(_difference, mlir.lower_fun(_exact, multiple_results=False))
mlir.register_lowering(_difference, mlir.lower_fun(_low, multiple_results=False), platform="tpu")
