"""The update in plain JAX: what every kernel must agree with, and what runs where none is."""

import math
from typing import Any

import jax.numpy as jnp

from halfstep.kernels.flash_update._block import update_block
from halfstep.kernels.flash_update._spec import Leaf, Scalars, Spec


def update(leaf: Leaf, grad: Any, by: Scalars, spec: Spec) -> Leaf:
    """One step of a leaf: that of a block which is all of it."""
    shape, groups = leaf.param.shape, spec.groups
    at = None
    if spec.stochastic:
        # Counted with what fills a last group, as kernels count.
        count = math.prod(groups.scale_shape(shape)) * groups.size
        at = groups.whole(jnp.arange(count, dtype=jnp.uint32), shape)
    return update_block(leaf, grad, by, spec, groups, at=at)
