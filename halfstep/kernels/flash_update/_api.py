"""Choose who computes an update."""

from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from halfstep.kernels._target import capability_of
from halfstep.kernels.flash_update import _block, _cpu, _gpu, _tpu, _xla_gpu
from halfstep.kernels.flash_update._block import SCALES
from halfstep.kernels.flash_update._partition import (
    alike,
    along_shards,
    explicit_sharding,
    may_be_divided,
    partitioned,
)
from halfstep.kernels.flash_update._rule import Leaf, Scalars, Spec, leaf_of

Implementation = Literal["xla", "gpu", "tpu", "interpret"] | None

_KERNELS = MappingProxyType({"gpu": _gpu, "interpret": _gpu, "tpu": _tpu})


def flash_update(
    leaf: Leaf,
    grad: Any,
    by: Scalars,
    spec: Spec,
    *,
    implementation: Implementation = None,
    sharding: NamedSharding | None = None,
) -> Leaf:
    """One step of a parameter and its compressed state.

    Args:
        leaf: The parameter and its state.
        grad: Its gradient, in any float dtype; it is not converted beforehand.
        by: The hyperparameters of the step.
        spec: Which optimizer it is, and how its state is written.
        implementation: `"xla"`, `"gpu"` or `"tpu"`; `"interpret"` runs the kernel of a GPU as JAX
            on any machine; `None` chooses by where it is compiled for, and takes `"xla"` for what
            there is no kernel for. The kernel of a GPU is for Hopper and Blackwell, with JAX 0.12.
        sharding: How the leaf is divided among devices, where it is known: every device then
            updates what it has, with a kernel on all platforms. JAX tells it by itself where a
            mesh has explicit axes. Without it the compiler divides the update: the kernel of a GPU,
            and on a TPU, where it cannot divide kernels, that of XLA.
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


def _bound(*arrays: Any, present: tuple[int, ...], spec: Spec, implementation: Any) -> Any:
    arrays = tuple(alike(arrays))
    divided = None
    if implementation != "xla" and may_be_divided():
        # Traced here and not only when it is lowered: JAX looks for it, and then tells the devices.
        local = _local(present, spec, implementation)
        divided = jax.make_jaxpr(_divided(local, arrays, present, spec))(*arrays)
    return _update.bind(
        *arrays, present=present, spec=spec, implementation=implementation, divided=divided
    )


def _local(present: tuple[int, ...], spec: Spec, implementation: Any) -> Any:
    """Return the update of what one device has."""
    return partial(
        _update.bind, present=present, spec=spec, implementation=implementation, divided=None
    )


def _divided(local: Any, arrays: Sequence[Any], present: tuple[int, ...], spec: Spec) -> Any:
    """Return the update that a compiler divides among devices."""
    return partitioned(local, arrays[2].shape, spec.groups, [i in SCALES for i in present])


def _check(implementation: str | None, leaf: Leaf, grad: Any, spec: Spec) -> None:
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


def _packed(by: Scalars) -> Any:
    """The hyperparameters in one array: a kernel is given nine numbers in one buffer."""
    index = jax.lax.iota(jnp.int32, len(by))
    packed = jnp.zeros(len(by), jnp.float32)
    for i, value in enumerate(by):
        # Chosen and not concatenated, for which XLA takes 350 KB on a TPU v5p.
        packed = jnp.where(index == i, jnp.asarray(value, jnp.float32), packed)
    return packed


def _scalars(by: Any) -> Scalars:
    return Scalars(*(by[i] for i in range(len(Scalars._fields))))


def _flat(leaf: Leaf) -> tuple[Any, ...]:
    return tuple(array for array in leaf if array is not None)


# Jitted, so that leaves of one shape are traced and lowered once.
@partial(jax.jit, static_argnames=("present", "spec"))
def _plain(by: Any, grad: Any, *arrays: Any, present: tuple[int, ...], spec: Spec) -> Any:
    return _flat(_block.update(leaf_of(present, arrays), grad, _scalars(by), spec))


@partial(jax.jit, static_argnames=("present", "spec"))
def _passes(by: Any, grad: Any, *arrays: Any, present: tuple[int, ...], spec: Spec) -> Any:
    return _flat(_cpu.update(leaf_of(present, arrays), grad, _scalars(by), spec))


@partial(jax.jit, static_argnames=("present", "spec"))
def _two_passes(by: Any, grad: Any, *arrays: Any, present: tuple[int, ...], spec: Spec) -> Any:
    return _flat(_xla_gpu.update(leaf_of(present, arrays), grad, _scalars(by), spec))


@partial(jax.jit, static_argnames=("present", "spec", "kind"))
def _kernel(
    by: Any, grad: Any, *arrays: Any, present: tuple[int, ...], spec: Spec, kind: str
) -> Any:
    leaf = leaf_of(present, arrays)
    return _flat(_KERNELS[kind].update(leaf, grad, by, spec, interpret=kind == "interpret"))


_update = Primitive("halfstep_flash_update")
_update.multiple_results = True


@partial(jax.jit, static_argnames=("present", "spec", "implementation"))
def _eager(*arrays: Any, present: tuple[int, ...], spec: Spec, implementation: Any) -> Any:
    return _bound(*arrays, present=present, spec=spec, implementation=implementation)


def _abstract(by: Any, grad: Any, *arrays: Any, **_: Any) -> list[Any]:
    del by, grad
    return list(arrays)


def _lowered(
    platform: str | None,
    ctx: Any,
    *args: Any,
    present: tuple[int, ...],
    spec: Spec,
    implementation: Any,
    divided: Any,
) -> Any:
    if implementation in ("gpu", "tpu") and implementation != platform:
        raise ValueError(
            f"implementation={implementation!r} is compiled for {platform or 'another platform'} "
            "here, which cannot run it. Pass implementation=None, which chooses by where it is "
            "compiled for, or 'interpret' to try the kernel of a GPU."
        )
    if implementation == "gpu":
        # Mosaic GPU assumes Hopper where nothing tells the GPU.
        reason = _gpu.refusal_of_gpu(capability_of(ctx) or _gpu.HOPPER)
        if reason is not None:
            raise ValueError(
                f"the kernel of implementation='gpu' {reason}. Pass implementation=None, which "
                "takes XLA there, or 'xla'."
            )
    chosen = _chosen(platform, ctx, present, spec, implementation)
    if chosen is None:
        run = partial(_by_xla(platform, ctx, implementation), present=present, spec=spec)
    elif not _is_divided(ctx):
        run = partial(_kernel, present=present, spec=spec, kind=chosen)
    elif divided is not None and _is_divided_here(ctx, platform):
        # Traced again: in the divided program, nothing tells which GPU it is for.
        run = _divided(_local(present, spec, chosen), ctx.avals_in, present, spec)
    elif implementation is None:
        run = partial(_by_xla(platform, ctx, None), present=present, spec=spec)
    else:
        raise ValueError(
            f"implementation={implementation!r} is divided among devices by a compiler that "
            "cannot divide kernels: one for TPUs, or one in another process. Pass sharding=, "
            "use a mesh with explicit axes or jax.shard_map, or pass implementation=None, "
            "which takes XLA for it."
        )
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


def _chosen(
    platform: str | None, ctx: Any, present: tuple[int, ...], spec: Spec, implementation: Any
) -> str | None:
    """Return which kernel computes an update; `None` for XLA."""
    kind: str | None = implementation or platform
    if kind is None or kind not in _KERNELS:
        return None
    grad, *arrays = ctx.avals_in[1:]
    if _KERNELS[kind].refusal(leaf_of(present, arrays), grad, spec):
        return None
    if platform == "gpu" and implementation is None and _gpu.refusal_of_gpu(capability_of(ctx)):
        return None
    return kind


def _by_xla(platform: str | None, ctx: Any, implementation: Any) -> Any:
    """Return the form of the update that the compiler of a platform makes the most of."""
    if platform == "gpu":
        return _two_passes
    # The passes for CPUs look at single elements, which would be asked of other devices.
    if platform == "cpu" and implementation is None and not _is_divided(ctx):
        return _passes
    return _plain


def _is_divided(ctx: Any) -> bool:
    """Whether the compiler divides this program among devices, and shapes are those of all."""
    context = ctx.module_context.axis_context
    if hasattr(context, "num_devices"):
        return context.num_devices > 1
    return set(context.manual_axes) != set(context.mesh.axis_names)


def _is_divided_here(ctx: Any, platform: str | None) -> bool:
    """Whether the compiler asks this process how to divide a kernel; that for TPUs never does."""
    return platform != "tpu" and not ctx.module_context.lowering_parameters.for_export


def _batched(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    # Groups are counted from the end: with an axis in front a leaf is a leaf.
    size = next(arg.shape[dim] for arg, dim in zip(args, dims, strict=True) if dim is not None)
    if dims[0] is not None:
        plain = partial(_plain, present=params["present"], spec=params["spec"])
        return jax.vmap(plain, in_axes=tuple(dims))(*args), [0] * (len(args) - 2)
    moved = [
        jnp.broadcast_to(arg, (size, *arg.shape)) if dim is None else jnp.moveaxis(arg, dim, 0)
        for arg, dim in zip(args[1:], dims[1:], strict=True)
    ]
    names = ("present", "spec", "implementation")
    made = _bound(args[0], *moved, **{name: params[name] for name in names})
    return made, [0] * len(made)


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    plain = partial(_plain, present=params["present"], spec=params["spec"])
    return jax.jvp(plain, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


_update.def_impl(lambda *arrays, divided, **params: _eager(*arrays, **params))
_update.def_abstract_eval(_abstract)
batching.primitive_batchers[_update] = _batched
ad.primitive_jvps[_update] = _differentiated
mlir.register_lowering(_update, partial(_lowered, None))
mlir.register_lowering(_update, partial(_lowered, "cpu"), platform="cpu")
mlir.register_lowering(_update, partial(_lowered, "gpu"), platform="cuda")
mlir.register_lowering(_update, partial(_lowered, "tpu"), platform="tpu")
