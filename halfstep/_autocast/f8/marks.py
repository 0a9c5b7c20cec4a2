"""Names that the products of a recipe have in compiled programs."""

import contextlib
from typing import Any

import jax

ELEMENTS = "halfstep_f8"
"""Elements of few bits are multiplied."""
ROUNDED = "halfstep_rounded"
"""What was rounded to few bits is multiplied in 16."""


def marked(*, direct: bool, quantized: bool = True) -> contextlib.AbstractContextManager[Any]:
    """A scope for one product; none for a leg that the recipe leaves alone."""
    if not quantized:
        return contextlib.nullcontext()
    return jax.named_scope(ELEMENTS if direct else ROUNDED)
