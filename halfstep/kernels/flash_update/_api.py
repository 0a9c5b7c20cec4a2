"""Choose the implementation that computes an update."""

from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from halfstep._base import ClosedJaxpr
from halfstep.kernels._target import capability_of, is_divided
from halfstep.kernels.flash_update import _block, _cpu, _gpu, _tpu, _xla_gpu
from halfstep.kernels.flash_update._block import SCALES
from halfstep.kernels.flash_update._partition import (
    Flat,
    Kind,
    alike,
    along_shards,
    explicit_sharding,
    may_be_divided,
    partitioned,
)
from halfstep.kernels.flash_update._rule import HasType, Leaf, Scalars, Spec, leaf_of

Implementation = Literal["xla", "gpu", "tpu", "interpret"] | None

_KERNELS = MappingProxyType({"gpu": _gpu, "interpret": _gpu, "tpu": _tpu})
# Forms that XLA compiles without a kernel: one for any platform, and two that suit its CPU and its
# GPU compiler better.
_FORMS = MappingProxyType({"plain": _block, "cpu": _cpu, "gpu": _xla_gpu})


def flash_update(
    leaf: Leaf,
    grad: Any,
    by: Scalars,
    spec: Spec,
    *,
    implementation: Implementation = None,
    sharding: NamedSharding | None = None,
) -> Leaf:
    """Step a parameter and its compressed state.

    Args:
        leaf: The parameter and its state.
        grad: The gradient, in any float dtype; it is not converted beforehand.
        by: The hyperparameters of the step.
        spec: The optimizer, and how its state is stored.
        implementation: `"xla"`, `"gpu"` or `"tpu"`; `"interpret"` runs the GPU kernel as JAX on any
            machine. `None` chooses by the platform that the program is compiled for, and uses
            `"xla"` where no kernel exists. The GPU kernel is for Hopper and Blackwell, with JAX
            0.12.
        sharding: How the leaf is divided among devices, if this is known. Every device then updates
            its own part, with a kernel on all platforms. For a mesh with explicit axes, JAX knows
            the sharding by itself. Without a sharding, the compiler divides the update. It can
            divide the GPU kernel. It cannot divide kernels for TPUs, so there XLA is used.
    """
    _check(implementation, leaf, grad, spec)
    present = leaf.present
    arrays = [_packed(by), grad, *(leaf[i] for i in present)]
    made = along_shards(
        partial(_bound, present=present, spec=spec, implementation=implementation),
        arrays,
        sharding or explicit_sharding(leaf.param),
    )
    return leaf_of(present, made)


def _bound(
    *arrays: jax.Array, present: tuple[int, ...], spec: Spec, implementation: Implementation
) -> Sequence[jax.Array]:
    arrays = tuple(alike(arrays))
    divided = None
    if implementation != "xla" and may_be_divided():
        # The divided update is traced here and not only when it is lowered: JAX looks for
        # `custom_partitioning` in the jaxpr, and tells the lowering rule the devices only if it
        # finds it.
        local = _local(present, spec, implementation)
        divided = jax.make_jaxpr(_divided(local, arrays, present, spec))(*arrays)
    return _update.bind(
        *arrays, present=present, spec=spec, implementation=implementation, divided=divided
    )


def _local(present: tuple[int, ...], spec: Spec, implementation: Implementation | str) -> Flat:
    """Return the update of the part that one device has."""
    return partial(
        _update.bind, present=present, spec=spec, implementation=implementation, divided=None
    )


def _divided(local: Flat, arrays: Sequence[HasType], present: tuple[int, ...], spec: Spec) -> Flat:
    """Return the update that a compiler divides among devices."""
    kinds: list[Kind] = [
        "scale" if i in SCALES else "packed" if i in spec.packed else "whole" for i in present
    ]
    return partitioned(local, arrays[2].shape, spec.groups, kinds)


def _check(implementation: str | None, leaf: Leaf, grad: HasType, spec: Spec) -> None:
    if implementation not in (None, "xla", *_KERNELS):
        raise ValueError(
            "implementation must be None, 'xla', 'gpu', 'tpu' or 'interpret'; "
            f"got {implementation!r}."
        )
    if implementation is not None and implementation in _KERNELS:
        reason = _KERNELS[implementation].refusal(leaf, grad, spec)
        if reason is not None:
            raise ValueError(
                f"the kernel of implementation={implementation!r} {reason}. Pass "
                "implementation=None, which takes XLA for such a leaf, or 'xla'."
            )


def _packed(by: Scalars) -> jax.Array:
    """Return the hyperparameters in one array: a kernel gets nine numbers in one buffer."""
    index = jax.lax.iota(jnp.int32, len(by))
    packed = jnp.zeros(len(by), jnp.float32)
    for i, value in enumerate(by):
        # Select instead of concatenating: XLA takes 350 KB for the concatenation on a TPU v5p.
        packed = jnp.where(index == i, jnp.asarray(value, jnp.float32), packed)
    return packed


def _scalars(by: jax.Array) -> Scalars:
    return Scalars(*(by[i] for i in range(len(Scalars._fields))))


def _flat(leaf: Leaf) -> tuple[jax.Array, ...]:
    return tuple(array for array in leaf if array is not None)


# This is jitted so that leaves of the same shape are traced and lowered once.
@partial(jax.jit, static_argnames=("present", "spec", "form"))
def _compiled(
    by: jax.Array,
    grad: jax.Array,
    *arrays: jax.Array,
    present: tuple[int, ...],
    spec: Spec,
    form: str,
) -> tuple[jax.Array, ...]:
    leaf = leaf_of(present, arrays)
    return _flat(_FORMS[form].update(leaf, grad, _scalars(by), spec))


@partial(jax.jit, static_argnames=("present", "spec", "kind"))
def _kernel(
    by: jax.Array,
    grad: jax.Array,
    *arrays: jax.Array,
    present: tuple[int, ...],
    spec: Spec,
    kind: str,
) -> tuple[jax.Array, ...]:
    leaf = leaf_of(present, arrays)
    return _flat(_KERNELS[kind].update(leaf, grad, by, spec, interpret=kind == "interpret"))


# This is a primitive and not a function: only a lowering rule knows the platform, the devices and
# whether a compiler divides the program. All three decide which implementation is used.
_update = Primitive("halfstep_flash_update")
_update.multiple_results = True


@partial(jax.jit, static_argnames=("present", "spec", "implementation"))
def _eager(
    *arrays: jax.Array, present: tuple[int, ...], spec: Spec, implementation: Implementation
) -> Sequence[jax.Array]:
    return _bound(*arrays, present=present, spec=spec, implementation=implementation)


def _abstract(by: object, grad: object, *arrays: Any, **_: object) -> list[Any]:
    del by, grad
    return list(arrays)


def _lowered(
    platform: str | None,
    ctx: mlir.LoweringRuleContext,
    *args: Any,
    present: tuple[int, ...],
    spec: Spec,
    implementation: Implementation,
    divided: ClosedJaxpr | None,
) -> Any:
    # A kernel is refused in this order: for a wrong platform, for a GPU or a leaf that it does not
    # support, and for a compiler that divides the program but not kernels. If the user has named an
    # implementation, a wrong platform, GPU or division raises. Otherwise XLA computes the update.
    if implementation in ("gpu", "tpu") and implementation != platform:
        raise ValueError(
            f"implementation={implementation!r} is compiled for {platform or 'another platform'} "
            "here, which cannot run it. Pass implementation=None, which chooses by where it is "
            "compiled for, or 'interpret' to try the kernel of a GPU."
        )
    if implementation == "gpu":
        # Mosaic GPU assumes Hopper if the GPU is not known.
        reason = _gpu.refusal_of_gpu(capability_of(ctx) or _gpu.HOPPER)
        if reason is not None:
            raise ValueError(
                f"the kernel of implementation='gpu' {reason}. Pass implementation=None, which "
                "takes XLA there, or 'xla'."
            )
    chosen = _chosen(platform, ctx, present, spec, implementation)
    if chosen is None:
        form = _by_xla(platform, ctx, implementation)
        run = partial(_compiled, present=present, spec=spec, form=form)
    elif not is_divided(ctx):
        run = partial(_kernel, present=present, spec=spec, kind=chosen)
    elif divided is not None and _is_divided_here(ctx, platform):
        # The update is traced again, with the chosen kernel: the lowering of the divided program
        # cannot tell which GPU it is for.
        avals: Any = ctx.avals_in
        run = _divided(_local(present, spec, chosen), avals, present, spec)
    elif implementation is None:
        form = _by_xla(platform, ctx, None)
        run = partial(_compiled, present=present, spec=spec, form=form)
    else:
        raise ValueError(
            f"implementation={implementation!r} is divided among devices by a compiler that "
            "cannot divide kernels: one for TPUs, or one in another process. Pass sharding=, "
            "use a mesh with explicit axes or jax.shard_map, or pass implementation=None, "
            "which takes XLA for it."
        )
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


def _chosen(
    platform: str | None,
    ctx: mlir.LoweringRuleContext,
    present: tuple[int, ...],
    spec: Spec,
    implementation: Implementation,
) -> str | None:
    """Return the kernel that computes an update; `None` for XLA."""
    kind: str | None = implementation or platform
    if kind is None or kind not in _KERNELS:
        return None
    avals: Any = ctx.avals_in
    _, grad, *arrays = avals
    if _KERNELS[kind].refusal(leaf_of(present, arrays), grad, spec):
        return None
    if platform == "gpu" and implementation is None and _gpu.refusal_of_gpu(capability_of(ctx)):
        return None
    return kind


def _by_xla(
    platform: str | None, ctx: mlir.LoweringRuleContext, implementation: Implementation
) -> str:
    """Return the form of the update that the compiler of a platform handles best."""
    if platform == "gpu":
        return "gpu"
    # The form for CPUs reads single elements, which in a divided program lie on other devices.
    if platform == "cpu" and implementation is None and not is_divided(ctx):
        return "cpu"
    return "plain"


def _is_divided_here(ctx: mlir.LoweringRuleContext, platform: str | None) -> bool:
    """Return whether the compiler asks this process how to divide a kernel.

    The compiler for TPUs never asks.
    """
    return platform != "tpu" and not ctx.module_context.lowering_parameters.for_export


def _batched(
    args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any
) -> tuple[Sequence[jax.Array], list[int]]:
    # The axis of groups is counted from the end. A batch of leaves, with one more axis in front, is
    # therefore itself a leaf, which one kernel updates.
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    implementation, spec = params["implementation"], params["spec"]
    if dims[0] is not None:
        # A kernel takes one set of scalars. With a set for each example, the plain form is used.
        if implementation in _KERNELS:
            raise ValueError(
                f"the kernel of implementation={implementation!r} takes one set of "
                f"hyperparameters; `jax.vmap` gave it {size}. Pass implementation=None, which "
                "takes XLA for such a batch, or 'xla'."
            )
        plain = partial(_compiled, present=params["present"], spec=params["spec"], form="plain")
        return jax.vmap(plain, in_axes=tuple(dims))(*args), [0] * (len(args) - 2)
    moved = [
        jnp.broadcast_to(arg, (size, *arg.shape)) if dim is None else jnp.moveaxis(arg, dim, 0)
        for arg, dim in zip(args[1:], dims[1:], strict=True)
    ]
    # The kernel may refuse a batch of leaves even if it takes each of them.
    _check(implementation, leaf_of(params["present"], moved[1:]), moved[0], spec)
    names = ("present", "spec", "implementation")
    made = _bound(args[0], *moved, **{name: params[name] for name in names})
    return made, [0] * len(made)


def _differentiated(primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any) -> Any:
    # Kernels cannot be differentiated. The plain form computes the same and can be.
    plain = partial(_compiled, present=params["present"], spec=params["spec"], form="plain")
    return jax.jvp(plain, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


# One compiled program computes the update outside `jit` too. Computed op by op, the update would
# take the temporaries that a fused form avoids.
_update.def_impl(lambda *arrays, divided, **params: _eager(*arrays, **params))
_update.def_abstract_eval(_abstract)
batching.primitive_batchers[_update] = _batched
ad.primitive_jvps[_update] = _differentiated
# JAX names NVIDIA's platform "cuda". Any other GPU gets the rule without a platform, which uses
# plain XLA.
mlir.register_lowering(_update, partial(_lowered, None))
mlir.register_lowering(_update, partial(_lowered, "cpu"), platform="cpu")
mlir.register_lowering(_update, partial(_lowered, "gpu"), platform="cuda")
mlir.register_lowering(_update, partial(_lowered, "tpu"), platform="tpu")
