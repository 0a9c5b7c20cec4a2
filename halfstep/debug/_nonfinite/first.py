"""`first_nonfinite`: the operation with which it began, from one bad batch."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from halfstep.debug._instrument.run import run
from halfstep.debug._instrument.trace import trace
from halfstep.debug._nonfinite.finding import NonFinite, finding
from halfstep.debug._nonfinite.origin import origin


def first_nonfinite(func: Callable[..., Any], *args: Any, **kwargs: Any) -> NonFinite | None:
    """Find the first operation whose result is not finite while its operands are.

    The function is compiled and run once, with a few numbers taken of every operation's result:
    of the forward and the backward pass and the update, inside of `scan`, `while_loop`, `cond`,
    `jax.checkpoint` and `shard_map`, on all devices. Nothing is called back on the host.

    An infinity or NaN that something masks (`jnp.where`) is not what is looked for, as long as
    another one reaches a result, or a check whether results are finite.

    Args:
        func: A loss, a gradient, or a whole training step; jitted or not.
        *args: What it is called with: the batch with which it goes wrong.
        **kwargs: The same, by name.

    Returns:
        What, where and out of which numbers, and what to do; `None` if all is finite.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def loss(scale, x):
            return jnp.sum(scale * jnp.sqrt(x))


        found = halfstep.debug.first_nonfinite(jax.grad(loss, argnums=1), 2.0, jnp.zeros(3))
        assert (found.site.op, found.site.stage) == ("div", "backward")
        assert found.count == 3
        ```
    """
    traced = trace(func, args, kwargs, sites="ops", compute=None)
    layout = traced.layout

    def rows_of(*arrays: Any) -> jax.Array:
        return run(layout, layout.body, arrays, traced.compute, detail=True)[1]

    rows = np.asarray(jax.jit(rows_of)(*traced.call.arrays))
    found = origin(layout, rows)
    return None if found is None else finding(layout, rows, found)
