"""Round loss scales of libraries that take any number to what the core takes."""

import math
from typing import SupportsFloat

import jax

# Growth in jmp and jaxamp ends where float32 does; of this scale the reciprocal is still normal.
CEILING = 2.0**126


def power_of_two_below(value: SupportsFloat, name: str) -> float:
    """A scale as these libraries accept it, any positive number, rounded down to a power of two.

    The core takes powers of two only. Whatever a loss is multiplied by is divided out again, so a
    rounded scale changes no result but the rounding errors, which vanish.
    """
    try:
        number = float(value)
    except jax.errors.ConcretizationTypeError as error:
        raise TypeError(
            f"`{name}` must be known when the loss scaling is made, but it is traced: make the "
            "loss scaling outside of jit, or pass a Python number such as 2.0**15."
        ) from error
    if not 0 < number < math.inf:
        return number  # The core's error says what is required.
    return 2.0 ** (math.frexp(number)[1] - 1)
