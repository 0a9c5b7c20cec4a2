"""Any optimizer of Optax, with its state in few bits."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from halfstep._base import path_string
from halfstep._training import gated
from halfstep.optim._coded import Codes, codes_in, decoded, encoded, encoded_like
from halfstep.optim._layout import MIN_SIZE, is_stochastic
from halfstep.optim._transform import Transformation, of_models, transformation

_NO_RULES: Mapping[str, str | None] = MappingProxyType({})


class CompressedState(NamedTuple):
    """The state of an optimizer, some of whose arrays are a `quant.Quantized`.

    Example:
        ```python
        import jax.numpy as jnp
        import optax
        from halfstep import optim

        optimizer = optim.compress(optax.adam(1e-3))
        state = optimizer.init({"w": jnp.ones((128, 64))})
        assert isinstance(state, optim.CompressedState) and state.count == 0
        moments = state.inner[0]
        assert moments.mu["w"].codes.dtype == jnp.int8
        assert moments.nu["w"].codes.dtype == jnp.uint8
        ```
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    """How many steps have been applied."""
    inner: Any


def compress(
    tx: optax.GradientTransformation,
    *,
    codes: Mapping[str, str | None] = _NO_RULES,
    min_size: int | None = None,
    scale_dtype: Any = "bfloat16",
    rounding: str = "nearest",
    seed: int | None = None,
) -> Transformation:
    """Store the state of any Optax optimizer in 8 bits, or in 4.

    What a state of Optax holds is known by its name: first moments and momenta are stored in
    `"int8"`, second moments in `"root8"`. What is not known, or would not survive it, stays as it
    is: `optim.coded` lists what was coded. Every step decodes the state, runs
    the optimizer and codes it again; `optim.flash_adamw` and its like do it in one pass.

    Args:
        tx: The optimizer.
        codes: Codes for parts of the state by their path in it, such as
            `{"**/mu": "int4", "**/nu": None}`; `None` leaves a part as it is.
        min_size: Arrays with fewer elements stay as they are; 4096 by default.
        scale_dtype: That of the scales: bfloat16 or float32.
        rounding: `"stochastic"` rounds codes up or down at random.
        seed: Where that randomness begins.

    Returns:
        An optimizer of Optax's kind, which also has `step` and `prepare`.

    Example:
        ```python
        import jax.numpy as jnp
        import optax
        from halfstep import optim

        optimizer = optim.compress(optax.chain(optax.clip_by_global_norm(1.0), optax.adan(1e-3)))
        state = optimizer.init({"w": jnp.ones((128, 64))})
        coded = [x.codes.dtype for x in optim.coded(state)]
        assert coded == ["int8", "int8", "uint8"]
        ```
    """
    is_random = is_stochastic(rounding)
    smallest = MIN_SIZE if min_size is None else min_size
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> CompressedState:
        inner = tx.init(params)
        found = codes_in(inner, codes, smallest)
        return CompressedState(
            jnp.zeros((), jnp.int32), encoded(inner, found, scale_dtype=scale_dtype)
        )

    def known(params: Any) -> tuple[Codes, dict[str, tuple[int, ...]]]:
        like = jax.eval_shape(tx.init, params)
        flat = jax.tree_util.tree_flatten_with_path(like)[0]
        shapes = {path_string(path): leaf.shape for path, leaf in flat if hasattr(leaf, "shape")}
        return codes_in(like, codes, smallest), shapes

    def step(
        params: Any, state: CompressedState, grads: Any, finite: Any = True, **extra_args: Any
    ) -> tuple[Any, CompressedState]:
        found, shapes = known(params)

        def commit(before: tuple[Any, CompressedState]) -> tuple[Any, CompressedState]:
            params, state = before
            inner = decoded(state.inner, found, shapes)
            updates, inner = tx.update(grads, inner, params, **extra_args)
            key = None
            if is_random:
                key = jax.random.fold_in(jax.random.key(seed or 0), state.count)
            inner = encoded_like(inner, state.inner, found, key=key)
            return optax.apply_updates(params, updates), CompressedState(state.count + 1, inner)

        return gated(finite, commit, (params, state))

    return of_models(transformation(init, step, lambda params: (params, init(params))))
