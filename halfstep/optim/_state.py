"""What the compressed optimizers store."""

from typing import Any, NamedTuple

from jaxtyping import Array, Int32


class FlashState(NamedTuple):
    """The state of a compressed optimizer: plain arrays, in trees like that of the parameters.

    A leaf of a moment is a `quant.Quantized` (codes and scales), or a float32 array for parameters
    that are small or were asked to be kept, or `None` where there is nothing to store.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep import optim

        params = {"w": jnp.ones((128, 64)), "b": jnp.zeros(64)}
        params, state = optim.flash_adamw(1e-3).prepare(params)
        assert isinstance(state, optim.FlashState) and state.count == 0
        assert state.low["w"].dtype == jnp.int8
        assert state.first["w"].codes.dtype == jnp.int8
        # Too small to be worth it: a float32 parameter with float32 moments.
        assert state.low["b"] is None and state.first["b"].dtype == jnp.float32
        ```
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    """How many steps have been applied."""
    low: Any
    """The bits that bfloat16 parameters lack: int8 for a master of 24 bits, int16 for one of 32."""
    first: Any
    """First moments, or momenta."""
    second: Any
    """Second moments."""
