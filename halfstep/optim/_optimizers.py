"""The compressed optimizers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from halfstep._base import checked
from halfstep.kernels.flash_update import Implementation
from halfstep.optim._flash import FlashRule, Number, flash
from halfstep.optim._layout import MasterBits, MomentBits, Rounding, options_of
from halfstep.optim._transform import Transformation

Rate = Number | Callable[[jax.Array], ArrayLike]


@checked
def flash_adamw(
    learning_rate: Rate,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 1e-4,
    *,
    mask: Any = None,
    master_bits: MasterBits = "auto",
    moment_bits: MomentBits = "auto",
    keep: Sequence[str] = (),
    min_size: int | None = None,
    scale_dtype: DTypeLike = "bfloat16",
    rounding: Rounding = "nearest",
    seed: int | None = None,
    implementation: Implementation = None,
) -> Transformation:
    """Make an AdamW whose parameters and state take 5 bytes per parameter instead of 12 or 14.

    Parameters are bfloat16. The state holds the bits that they lack, and both moments in 8 bits
    with a scale for every 32 elements. Training follows `optax.adamw` with the same
    hyperparameters.

    The other compressed optimizers have the same keyword options, which are explained here.

    Args:
        learning_rate: A number, a traced scalar, or a schedule of Optax.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled; a multiple of the learning rate.
        mask: Where weights decay: a tree of booleans, which may be a prefix of the parameters'
            tree, or a function of the parameters that returns such a tree.
        master_bits: The bits of a bfloat16 parameter and its state together: 24 (also `"auto"`) or
            32, which equals float32 exactly; with `None` the state holds no bits of parameters.
            Float32 parameters are their own master.
        moment_bits: The bits of each element of a moment: 8 (also `"auto"`), or 4. With 4,
            parameters and state take 4.125 bytes, and codes are always rounded up or down at
            random.
        keep: Paths of parameters whose moments stay float32, such as `"**/embedding"`.
        min_size: Parameters with fewer elements stay float32 too; 4096 by default.
        scale_dtype: The dtype of the scales: bfloat16 or float32.
        rounding: `"stochastic"` rounds the second moment, and a master of 24 bits, up or down at
            random. With it, a moment with a long memory (`b2` of 0.999 and above) can forget, and
            steps that are smaller than the last of 24 bits add up.
        seed: The random seed for `rounding`.
        implementation: The kernel that computes the step: `"xla"`, `"gpu"`, `"tpu"` or
            `"interpret"`. By default the kernel of the platform that the step is compiled for.

    Returns:
        An Optax optimizer that also has `step` and `prepare`.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep import optim, quant

        params = {"w": jnp.ones((128, 64)), "b": jnp.zeros(64)}
        optimizer = optim.flash_adamw(1e-3)
        params, state = optimizer.prepare(params)
        assert params["w"].dtype == jnp.bfloat16
        assert params["b"].dtype == jnp.float32

        grads = jax.tree.map(jnp.ones_like, params)
        params, state = optimizer.step(params, state, grads)
        # Less than half a unit of bfloat16 at 1: the bits that changed are those in the state.
        assert (params["w"] == 1).all()
        assert (quant.join(params["w"], state.low["w"]) < 1).all()
        ```
    """
    options = options_of(
        master_bits=master_bits,
        moment_bits=moment_bits,
        keep=keep,
        min_size=min_size,
        scale_dtype=scale_dtype,
        rounding=rounding,
        seed=seed,
        implementation=implementation,
    )
    rule = FlashRule(
        "adam",
        learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        decay=weight_decay,
        mask=mask,
        moments=(True, True),
    )
    return flash(rule, options)


@checked
def flash_adam(
    learning_rate: Rate,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    *,
    master_bits: MasterBits = "auto",
    moment_bits: MomentBits = "auto",
    keep: Sequence[str] = (),
    min_size: int | None = None,
    scale_dtype: DTypeLike = "bfloat16",
    rounding: Rounding = "nearest",
    seed: int | None = None,
    implementation: Implementation = None,
) -> Transformation:
    """Make an Adam in 5 bytes per parameter: `flash_adamw` without weight decay.

    Args:
        learning_rate: A number, a traced scalar, or a schedule of Optax.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the denominator.
        master_bits: 24, 32 or `None`, see `flash_adamw`.
        moment_bits: 8 or 4, see `flash_adamw`.
        keep: Paths of parameters whose moments stay float32.
        min_size: Parameters with fewer elements stay float32 too; 4096 by default.
        scale_dtype: The dtype of the scales: bfloat16 or float32.
        rounding: `"nearest"` or `"stochastic"`, see `flash_adamw`.
        seed: The random seed for `rounding`.
        implementation: The kernel that computes the step, see `flash_adamw`.

    Returns:
        An Optax optimizer that also has `step` and `prepare`.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import optax
        from halfstep import optim

        params = jax.eval_shape(lambda: {"w": jnp.zeros((1024, 1024))})
        small = jax.eval_shape(optim.flash_adam(1e-3).prepare, params)
        usual = jax.eval_shape(optax.adam(1e-3).init, params)
        assert optim.stored_bytes(params, usual) / 1024**2 >= 12
        assert optim.stored_bytes(small) / 1024**2 < 5.126
        ```
    """
    return flash_adamw(
        learning_rate,
        b1,
        b2,
        eps,
        0.0,
        master_bits=master_bits,
        moment_bits=moment_bits,
        keep=keep,
        min_size=min_size,
        scale_dtype=scale_dtype,
        rounding=rounding,
        seed=seed,
        implementation=implementation,
    )


@checked
def flash_lion(
    learning_rate: Rate,
    b1: Number = 0.9,
    b2: Number = 0.99,
    weight_decay: Number = 1e-3,
    *,
    mask: Any = None,
    master_bits: MasterBits = "auto",
    moment_bits: MomentBits = "auto",
    keep: Sequence[str] = (),
    min_size: int | None = None,
    scale_dtype: DTypeLike = "bfloat16",
    rounding: Rounding = "nearest",
    seed: int | None = None,
    implementation: Implementation = None,
) -> Transformation:
    """Make a Lion in 4 bytes per parameter.

    Args:
        learning_rate: A number, a traced scalar, or a schedule of Optax.
        b1: The share of the momentum in a step.
        b2: Decay of the momentum.
        weight_decay: Decoupled; a multiple of the learning rate.
        mask: Where weights decay, see `flash_adamw`.
        master_bits: 24, 32 or `None`, see `flash_adamw`.
        moment_bits: 8 or 4, see `flash_adamw`.
        keep: Paths of parameters whose momentum stays float32.
        min_size: Parameters with fewer elements stay float32 too; 4096 by default.
        scale_dtype: The dtype of the scales: bfloat16 or float32.
        rounding: `"stochastic"` rounds a master of 24 bits up or down at random.
        seed: The random seed for `rounding`.
        implementation: The kernel that computes the step, see `flash_adamw`.

    Returns:
        An Optax optimizer that also has `step` and `prepare`.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep import optim

        optimizer = optim.flash_lion(1e-4)
        params, state = optimizer.prepare({"w": jnp.zeros((128, 64))})
        assert optim.stored_bytes(params, state) / (128 * 64) < 4.1
        params, state = jax.jit(optimizer.step)(params, state, {"w": jnp.ones((128, 64))})
        assert jnp.allclose(params["w"].astype(jnp.float32), -1e-4, rtol=0.01)
        ```
    """
    options = options_of(
        master_bits=master_bits,
        moment_bits=moment_bits,
        keep=keep,
        min_size=min_size,
        scale_dtype=scale_dtype,
        rounding=rounding,
        seed=seed,
        implementation=implementation,
    )
    rule = FlashRule(
        "lion", learning_rate, b1=b1, b2=b2, decay=weight_decay, mask=mask, moments=(True, False)
    )
    return flash(rule, options)


@checked
def flash_sgd(
    learning_rate: Rate,
    momentum: Number | None = None,
    nesterov: bool = False,
    *,
    weight_decay: Number = 0.0,
    mask: Any = None,
    master_bits: MasterBits = "auto",
    moment_bits: MomentBits = "auto",
    keep: Sequence[str] = (),
    min_size: int | None = None,
    scale_dtype: DTypeLike = "bfloat16",
    rounding: Rounding = "nearest",
    seed: int | None = None,
    implementation: Implementation = None,
) -> Transformation:
    """Make stochastic gradient descent in 4 bytes per parameter with momentum, in 3 without.

    Args:
        learning_rate: A number, a traced scalar, or a schedule of Optax.
        momentum: Decay of the momentum. Without it, no momentum is stored.
        nesterov: Whether to use Nesterov's momentum.
        weight_decay: Decoupled; a multiple of the learning rate.
        mask: Where weights decay, see `flash_adamw`.
        master_bits: 24, 32 or `None`, see `flash_adamw`.
        moment_bits: 8 or 4, see `flash_adamw`.
        keep: Paths of parameters whose momentum stays float32.
        min_size: Parameters with fewer elements stay float32 too; 4096 by default.
        scale_dtype: The dtype of the scales: bfloat16 or float32.
        rounding: `"stochastic"` rounds a master of 24 bits up or down at random.
        seed: The random seed for `rounding`.
        implementation: The kernel that computes the step, see `flash_adamw`.

    Returns:
        An Optax optimizer that also has `step` and `prepare`.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep import optim

        optimizer = optim.flash_sgd(0.1)
        params, state = optimizer.prepare({"w": jnp.zeros((128, 64))})
        assert optim.stored_bytes(params, state) / (128 * 64) < 3.1
        params, state = jax.jit(optimizer.step)(params, state, {"w": jnp.ones((128, 64))})
        assert jnp.allclose(params["w"].astype(jnp.float32), -0.1, rtol=0.01)
        ```
    """
    options = options_of(
        master_bits=master_bits,
        moment_bits=moment_bits,
        keep=keep,
        min_size=min_size,
        scale_dtype=scale_dtype,
        rounding=rounding,
        seed=seed,
        implementation=implementation,
    )
    rule = FlashRule(
        "sgd",
        learning_rate,
        b1=0.0 if momentum is None else momentum,
        decay=weight_decay,
        mask=mask,
        moments=(momentum is not None, False),
        nesterov=nesterov,
    )
    return flash(rule, options)
