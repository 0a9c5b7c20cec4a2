"""Find arithmetic that goes wrong: compute a step twice, and compare the results."""

from collections.abc import Callable
from typing import Any

import jax

from halfstep._base import checked
from halfstep.reliability._rest import differences, rest_check


class ReplayError(RuntimeError):
    """The same computation on the same arrays gave different bits.

    Example:
        ```python
        import itertools
        import jax.numpy as jnp
        from halfstep.reliability import ReplayError, replay_check

        calls = itertools.count()
        try:
            replay_check(lambda x: x + next(calls), jnp.ones(3), step=8)
        except ReplayError as error:
            message = str(error)
        assert "step 8 has been computed twice" in message
        ```
    """


@checked
def replay_check(func: Callable[..., Any], *args: Any, step: int | None = None) -> Any:
    """Compute a result twice, and compare the bits.

    A core that sometimes computes wrong results raises no error, and its numbers are finite. Pass
    the gradient of one microbatch every hundred steps or so. Both runs are on the same devices, so
    results that are always wrong in the same way are not found. On GPUs, programs that add in any
    order (scatters) need `--xla_gpu_deterministic_ops=true`.

    Args:
        func: A compiled function without side effects that donates nothing.
        *args: The arguments of the function.
        step: The number of the step, for the message.

    Returns:
        The result of the function.

    Raises:
        ReplayError: If the bits differ, on all processes. The message names results and devices.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp

        gradient = jax.jit(jax.grad(lambda w, x: jnp.mean((x @ w) ** 2)))
        w, x = jnp.ones((4, 2)), jnp.ones((3, 4))
        grads = halfstep.reliability.replay_check(gradient, w, x, step=100)
        assert grads.shape == (4, 2)
        ```
    """
    result = func(*args)
    # Each run is its own program: in one program, the compiler would compute the result only once.
    digests = rest_check(jax.block_until_ready(result))
    changed = differences(digests, rest_check(func(*args)))
    if changed:
        when = "a step" if step is None else f"step {step}"
        raise ReplayError(
            f"{when} has been computed twice, with other bits in {'; '.join(changed)}. Skip it, "
            "and leave the named devices out if it happens again; on GPUs, make sure that the "
            "program is deterministic (--xla_gpu_deterministic_ops=true)."
        )
    return result
