"""The options of compressed optimizers: which leaves they compress, in which groups, and where."""

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from halfstep._base import match_rules, path_string
from halfstep.kernels.flash_update import Implementation
from halfstep.quant import Groups, Quantized, groups_for
from halfstep.quant._codes import as_scale_dtype
from halfstep.quant._groups import SIZE

MasterBits = Literal[24, 32, "auto"] | None
MomentBits = Literal[8, 4, "auto"]
Rounding = Literal["nearest", "stochastic"]

ArrayOrShape = jax.Array | np.ndarray | jax.ShapeDtypeStruct
"""A leaf of the parameters, or its shape. Each has a dtype, a shape and perhaps a sharding."""

_MIN_SIZE = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateOptions:
    """The options that compressed optimizers share, checked. `options_of` makes them.

    The first five say how a state is laid out: they must be the same after a restart.

    Attributes:
        master_bits: 24 or 32, the bits of a bfloat16 parameter and its state together; `None` if
            the state holds no bits of the parameters.
        moment_bits: 8 or 4, the bits of each element of a moment.
        keep: Paths of parameters that are not compressed.
        min_size: Leaves with fewer elements are not compressed either. Norms and biases are such
            leaves: compressing them would save nothing.
        scale_dtype: The dtype of the scales, bfloat16 or float32.
        stochastic: Whether codes are rounded up or down at random.
        seed: The random seed for stochastic rounding.
        implementation: The kernel that computes the step; `None` for the platform's own.
    """

    master_bits: Literal[24, 32] | None
    moment_bits: Literal[4, 8]
    keep: tuple[str, ...]
    min_size: int
    scale_dtype: np.dtype
    stochastic: bool
    seed: int
    implementation: Implementation

    def groups(self, params: PyTree) -> list[Groups | None]:
        """Return the groups of each leaf; `None` for leaves that are not compressed."""
        flat, _ = jax.tree_util.tree_flatten_with_path(params)
        kept = match_rules(self.keep, [path_string(path) for path, _ in flat], option="keep")
        return [
            None if is_kept else self._groups_of(leaf)
            for (_, leaf), is_kept in zip(flat, kept, strict=True)
        ]

    def _groups_of(self, leaf: PyTree) -> Groups | None:
        is_float = getattr(leaf, "dtype", None) in (jnp.float32, jnp.bfloat16)
        if not is_float or not leaf.shape or np.size(leaf) < self.min_size:
            return None
        return groups_for(leaf.shape, shards=shards_of(leaf))

    @property
    def codes(self) -> tuple[str, str]:
        """The codes of first and of second moments."""
        return ("int8", "root8") if self.moment_bits == 8 else ("int4", "root4")

    @property
    def low_dtype(self) -> np.dtype | None:
        """The dtype of the bits that a bfloat16 parameter lacks; `None` if none are stored."""
        bits = {24: np.int8, 32: np.int16}
        return None if self.master_bits is None else np.dtype(bits[self.master_bits])


def options_of(
    *,
    master_bits: ArrayLike | str | None = "auto",
    moment_bits: ArrayLike | str = "auto",
    keep: Sequence[str] = (),
    min_size: int | None = None,
    scale_dtype: DTypeLike = "bfloat16",
    rounding: str = "nearest",
    seed: int | None = None,
    implementation: Implementation = None,
) -> StateOptions:
    """Check the options of an optimizer. `flash_adamw` explains them.

    Raises:
        ValueError: If an option has a value that it does not allow.
    """
    # The type is checked first: `optax.inject_hyperparams` traces every number that is not named in
    # its static_args, and a traced 24 cannot be compared with anything.
    is_known = master_bits is None or isinstance(master_bits, int | str)
    if not is_known or master_bits not in (None, "auto", 24, 32):
        raise ValueError(
            f"master_bits must be 24, 32, 'auto' or None, and not traced; got {master_bits!r}. "
            "With optax.inject_hyperparams name it in static_args."
        )
    if not isinstance(moment_bits, int | str) or moment_bits not in (4, 8, "auto"):
        raise ValueError(
            f"moment_bits must be 8, 4 or 'auto', and not traced; got {moment_bits!r}. With "
            "optax.inject_hyperparams name it in static_args."
        )
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be 'nearest' or 'stochastic'; got {rounding!r}.")
    return StateOptions(
        master_bits=None if master_bits is None else 32 if master_bits == 32 else 24,
        moment_bits=4 if moment_bits == 4 else 8,
        keep=tuple(keep),
        min_size=_MIN_SIZE if min_size is None else min_size,
        scale_dtype=as_scale_dtype(scale_dtype),
        stochastic=rounding == "stochastic",
        seed=seed or 0,
        implementation=implementation,
    )


def sharding_of(leaf: object) -> NamedSharding | None:
    """Return how a leaf is divided among devices; `None` if this is not known."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, Tracer):
        # A tracer has no devices. Its type has a sharding if the axes of the mesh are explicit.
        sharding = getattr(jax.typeof(leaf), "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return sharding


def shards_of(leaf: ArrayOrShape) -> tuple[int, ...]:
    """Return the number of parts into which devices divide each axis of a leaf."""
    sharding = sharding_of(leaf)
    if sharding is None:
        return (1,) * len(leaf.shape)
    # A spec may be shorter than a shape: axes that it does not name are not divided.
    axes = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
    return tuple(_parts(sharding, axis) for axis in axes)


def _parts(sharding: NamedSharding, axis: object) -> int:
    """Return the number of parts into which an entry of a sharding's spec divides an axis."""
    names = (axis,) if isinstance(axis, str) else axis if isinstance(axis, tuple) else ()
    return math.prod(sharding.mesh.shape[name] for name in names)


def zeros(shape: Sequence[int], dtype: DTypeLike, like: object) -> jax.Array:
    """Return zeros that are divided among devices like a given leaf."""
    sharding = sharding_of(like)
    if sharding is None:
        return jnp.zeros(tuple(shape), dtype)
    return jnp.zeros(tuple(shape), dtype, device=sharding)


def state_shardings(state: Any, params: Any) -> Any:
    """Derive shardings for an optimizer's state from those of the parameters.

    Use them as `out_shardings` of a compiled `init` or `prepare`, and to restore a checkpoint onto
    another mesh. Arrays that belong to a parameter, codes and scales included, are sharded like the
    parameter. The rest, such as a count, is replicated on every device. Scales are also replicated
    along an axis that has too few of them to be divided; a warning says so if a group of elements
    that share a scale then lies on several devices.

    Args:
        state: A state of any optimizer, or its shapes, as `jax.eval_shape(optimizer.init, params)`
            returns them. The path of each array that belongs to a parameter must contain the
            parameter's path.
        params: Parameters, or `jax.ShapeDtypeStruct`s with shardings over a mesh.

    Returns:
        A tree like `state`, of `NamedSharding`s.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep import optim
        from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        where = NamedSharding(mesh, PartitionSpec("data"))
        params = {"w": jax.ShapeDtypeStruct((128, 64), jnp.bfloat16, sharding=where)}
        optimizer = optim.flash_adamw(1e-3)
        shapes = jax.eval_shape(optimizer.init, params)
        shardings = optim.state_shardings(shapes, params)
        assert shardings.first["w"].scale.spec == PartitionSpec("data")
        ```
    """
    found = {
        path_string(path): (leaf, sharding_of(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    mesh = one_mesh([sharding for _, sharding in found.values()])
    everywhere = NamedSharding(mesh, PartitionSpec())
    torn: dict[str, str] = {}

    def of(path: tuple[object, ...], leaf: ArrayOrShape) -> NamedSharding:
        names = path_string(path).split("/")
        # The last name of a compressed leaf is a field of `Quantized` and not a part of the path.
        names = names[:-1] if names[-1] in Quantized._fields else names
        # Try the longest path first: `layers/w` before `w`.
        for start in range(len(names)):
            param, sharding = found.get("/".join(names[start:]), (None, None))
            if param is not None and sharding is not None and _is_alike(leaf, param):
                for said in _torn(leaf, param, sharding):
                    torn["/".join(names[start:])] = said
                return _that_fits(leaf, sharding)
        return everywhere

    made = jax.tree_util.tree_map_with_path(of, state)
    if torn:
        path, said = next(iter(torn.items()))
        more = f", and so do those of {len(torn) - 1} more parameters" if len(torn) > 1 else ""
        warnings.warn(
            f"groups of {SIZE} elements that share a scale lie on several devices: of {path}, "
            f"{said}{more}. Each step then moves these parameters between devices. Make the state "
            "with optim.sharded(optimizer.init, params), or the same of `prepare`, which sees how "
            "parameters are divided; JAX does not show it to code that it traces.",
            stacklevel=2,
        )
    return made


def one_mesh(shardings: Sequence[NamedSharding | None]) -> Mesh | AbstractMesh:
    """Return the mesh of all shardings.

    Raises:
        ValueError: If there is none, or more than one.
    """
    meshes = {sharding.mesh for sharding in shardings if sharding is not None}
    if len(meshes) != 1:
        raise ValueError(
            "`params` must have shardings over one mesh; got "
            f"{len(meshes) or 'no'} mesh{'es' if len(meshes) != 1 else ''}. Give arrays, or "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))."
        )
    return meshes.pop()


def _torn(leaf: ArrayOrShape, param: ArrayOrShape, sharding: NamedSharding) -> Iterator[str]:
    """Say where a device has a part of a group; nothing if every device has whole groups."""
    pairs = zip(leaf.shape, param.shape, sharding.spec, strict=False)
    for axis, (scales, size, names) in enumerate(pairs):
        parts = _parts(sharding, names)
        if scales == math.ceil(size / SIZE) < size and parts > 1 and size // parts % SIZE:
            yield f"each has {size // parts} of {size} elements along axis {axis}"


def _that_fits(leaf: ArrayOrShape, sharding: NamedSharding) -> NamedSharding:
    """Return the sharding without the axes along which the array is too short to be divided."""
    pairs = zip(leaf.shape, sharding.spec, strict=False)
    spec = [axis if size % _parts(sharding, axis) == 0 else None for size, axis in pairs]
    if tuple(spec) == tuple(sharding.spec):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _is_alike(leaf: ArrayOrShape, param: ArrayOrShape) -> bool:
    """Return whether each axis of an array corresponds to an axis of a parameter.

    The axis may be as long as the parameter's (codes), divided into groups (scales), or half of
    that axis padded to full groups (two codes of 4 bits in a byte).
    """
    if len(leaf.shape) != len(param.shape):
        return False

    def lengths(dim: int) -> tuple[int, int, int]:
        groups = math.ceil(dim / SIZE)
        return dim, groups, groups * SIZE // 2

    return all(ours in lengths(dim) for ours, dim in zip(leaf.shape, param.shape, strict=True))
