"""The names of other libraries over halfstep's core: change the import, keep the step.

`import halfstep.compat.mpx as mpx` and `import halfstep.compat.jmp as jmp` have every public name
of mpx 0.1.8 and jmp 0.0.4, with their signatures and their order of returns;
`import halfstep.compat.jaxamp as jaxamp` has what the README of jaxamp 0.0.4 shows.
"""

import math
from typing import Any

import jax


def _power_of_two_below(value: Any, name: str) -> float:
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
