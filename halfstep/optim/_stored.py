"""What became of a state: which of its arrays are in codes, and what all of it takes."""

from typing import Any

import jax

from halfstep.quant import Quantized


def coded(state: Any) -> list[Quantized]:
    """The arrays of a state that are stored in codes.

    Args:
        state: Any optimizer's.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep import optim

        params = {"w": jnp.ones((128, 64)), "b": jnp.zeros(64)}
        state = optim.flash_adam(1e-3).init(params)
        # Both moments of `w`; those of `b` are too small.
        assert [x.codes.shape for x in optim.coded(state)] == [(128, 64), (128, 64)]
        ```
    """
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, Quantized))
    return [leaf for leaf in leaves if isinstance(leaf, Quantized)]


def stored_bytes(*trees: Any) -> int:
    """How many bytes the arrays of trees take, over all devices once.

    Args:
        *trees: Such as parameters and an optimizer's state, or their shapes.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep import optim

        params = jax.eval_shape(lambda: {"w": jnp.zeros((4096, 4096))})
        made = jax.eval_shape(optim.flash_adamw(1e-3).prepare, params)
        assert optim.stored_bytes(made) / 4096**2 < 5.1251
        ```
    """
    leaves = [leaf for leaf in jax.tree.leaves(trees) if hasattr(leaf, "dtype")]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
