"""Round the loss scales of other libraries, which take any number, to the core's powers of two."""

import math
from typing import SupportsFloat

import jax

# In jmp and jaxamp, a scale grows up to the limit of float32. The reciprocal of this scale is still
# a normal number.
CEILING = 2.0**126


def power_of_two_below(value: SupportsFloat, name: str) -> float:
    """Round a scale down to a power of two.

    These libraries accept any positive number, but the core takes only powers of two. The factor of
    the loss is divided out again, so a rounded scale changes no result except for the rounding
    errors, which vanish.
    """
    try:
        number = float(value)
    except jax.errors.ConcretizationTypeError as error:
        raise TypeError(
            f"`{name}` must be known when the loss scaling is made, but it is traced: make the "
            "loss scaling outside jit, or pass a Python number such as 2.0**15."
        ) from error
    if not 0 < number < math.inf:
        return number  # The core's error says what is required.
    return 2.0 ** (math.frexp(number)[1] - 1)
