"""Lower a step in the user's process, for hardware that is not there.

Closures, notebooks and modules that exist only in this process are not a problem: only StableHLO
and the shapes of flat arguments leave the process, no Python.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import export
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from halfstep._base import argument_names, is_array, path_string
from halfstep._preflight.preflight_errors import PreflightError
from halfstep._preflight.target.mesh import find_mesh, spread
from halfstep._program import equations
from halfstep.kernels._target import depends_on_generation

_Array = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class ArgumentLeaf:
    """One array that the step is given."""

    path: tuple[Any, ...]
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Bytes on one device."""
    donated: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """A step as a compiler needs it."""

    serialized: bytes
    fingerprint: str
    """A hash of the computation, without its locations in the source."""
    platform: str
    leaves: tuple[ArgumentLeaf, ...]
    axes: tuple[tuple[str, int], ...]
    """The axes of the mesh, outermost first; none for a step on one device."""
    axis_types: tuple[str, ...]
    """Whether each axis is `Auto`, `Explicit` or `Manual`."""

    @property
    def donated(self) -> tuple[int, ...]:
        """Positions of the arrays whose memory the step may reuse."""
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.donated)


def lower(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    platform: str,
    donate_argnums: Sequence[int] = (),
    mesh: AbstractMesh | Mesh | None = None,
    shardings: object = None,
    device_kind: str = "",
) -> Program:
    """Trace a step and lower it for a platform, without running or allocating anything.

    Args:
        step: The step.
        args: Its arguments; arrays may be shapes.
        platform: `"cuda"` or `"tpu"`.
        donate_argnums: Arguments whose memory it may reuse.
        mesh: The mesh that it runs on, if there is one.
        shardings: How arguments are divided over the mesh.
        device_kind: The GPU's own name, for kernels whose lowering depends on it.
    """
    _check_count(step, args)
    names = argument_names(step, len(args))
    for number in donate_argnums:
        if not (isinstance(number, int) and 0 <= number < len(args)):
            raise PreflightError(
                f"donate_argnums must be positions of arguments, 0 to {len(args) - 1}; "
                f"got {number!r}."
            )
    pairs, treedef = jtu.tree_flatten_with_path(args)
    specs = [None] * len(pairs) if shardings is None else spread(shardings, args)
    labels = [path_string(path[1:], root=names[path[0].idx]) for path, _ in pairs]
    dynamic = [i for i, (_, leaf) in enumerate(pairs) if _is_dynamic(leaf)]
    given = [specs[i] if specs[i] is not None else _sharding(pairs[i][1]) for i in dynamic]
    mesh = find_mesh(mesh, [(labels[i], s) for i, s in zip(dynamic, given, strict=True)])
    structs = [
        _struct(pairs[i][1], sharding, mesh, labels[i])
        for i, sharding in zip(dynamic, given, strict=True)
    ]

    # The step is exported as a function of flat arrays: otherwise JAX would have to serialize the
    # tree, which it can only do for types that were registered for that.
    def flat(*arrays: Any) -> tuple[Any, ...]:
        leaves = [leaf for _, leaf in pairs]
        for i, array in zip(dynamic, arrays, strict=True):
            leaves[i] = array
        out = step(*jtu.tree_unflatten(treedef, leaves))
        # A filtered step may return functions and settings in addition to its arrays.
        return tuple(leaf for leaf in jax.tree.leaves(out) if eqx.is_array(leaf))

    jitted = jax.jit(flat)
    abstract = mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh
    # Tracing comes first, so that a mistake in the step raises the user's own error, not ours.
    with _within(abstract):
        traced = jitted.trace(*structs).jaxpr.jaxpr
    refuse_callbacks(traced, platform)
    if abstract is None:
        abstract = _described(traced, platform, device_kind)
    with _within(abstract):
        exported = _export(jitted, structs, platform, step)
    # `donate_argnums` counts arguments of the step, as in `jax.jit`; the compiler counts leaves.
    donated = {*donate_argnums, *_own_donation(step, args)}
    leaves = tuple(
        ArgumentLeaf(
            path=pairs[i][0],
            name=labels[i],
            shape=tuple(struct.shape),
            dtype=str(struct.dtype),
            bytes=_bytes(struct),
            donated=pairs[i][0][0].idx in donated,
        )
        for i, struct in zip(dynamic, structs, strict=True)
    )
    axes = () if mesh is None else tuple(dict(mesh.shape).items())
    types = () if mesh is None else tuple(found.name for found in mesh.axis_types)
    return Program(
        bytes(exported.serialize()), _fingerprint(exported), platform, leaves, axes, types
    )


def _check_count(step: Callable[..., Any], args: Sequence[Any]) -> None:
    """Raise unless a step takes as many arguments as are given."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # Built-in callables have no signature.
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        raise PreflightError(
            f"`args` must be the arguments of the step, {signature}; got {len(args)}: {error}."
        ) from None


def _within(mesh: AbstractMesh | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)


def _described(jaxpr: core.Jaxpr, platform: str, kind: str) -> AbstractMesh | None:
    """Return a mesh without axes that names the GPU of a step's Pallas kernels; else `None`.

    Since JAX 0.11, Pallas-Triton asks for the GPU when it lowers, and looks for it in this mesh if
    the machine has no GPU.
    """
    # Only programs with a kernel get this mesh: a mesh, even one without axes, is part of the
    # lowered program, and all other programs are the same for all GPUs.
    is_kernel = (equation.primitive.name == "pallas_call" for equation in equations(jaxpr))
    if platform != "cuda" or jax.__version_info__ < (0, 11) or not any(is_kernel):
        return None
    depends_on_generation()
    make: Any = jax.sharding.AbstractDevice
    device = make(device_kind=kind, num_cores=None, platform="gpu")
    return AbstractMesh((), (), abstract_device=device)


def _is_dynamic(leaf: object) -> bool:
    if getattr(leaf, "dtype", None) == jax.dtypes.float0:
        return False  # The gradient of an integer: it has no bits, and no compiler knows it.
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _sharding(leaf: object) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    # An array that simply lies on a device says nothing about where it should lie on the target.
    return sharding if isinstance(sharding, NamedSharding) else None


def _struct(
    leaf: _Array,
    sharding: NamedSharding | PartitionSpec | None,
    mesh: AbstractMesh | Mesh | None,
    label: str,
) -> jax.ShapeDtypeStruct:
    # The dtype is the one that `jax.jit` would use: NumPy's float64 is float32 unless 64-bit types
    # are on. Keys have a dtype of JAX's own, which is canonical.
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if not _is_key(leaf) else leaf.dtype
    if mesh is None:
        if sharding is not None:
            raise PreflightError(
                f"`shardings` gives {label} the specification {sharding}, but `mesh` is None. "
                'Give the sizes of its axes, such as mesh={"data": 8}.'
            )
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    # An argument without a specification is on every device, as under `jax.jit` with a mesh.
    if isinstance(sharding, PartitionSpec) or sharding is None:
        sharding = NamedSharding(mesh, sharding or PartitionSpec())
    try:
        sharding.shard_shape(tuple(leaf.shape))
    except ValueError as error:
        raise PreflightError(
            f"{label} of shape {tuple(leaf.shape)} cannot be sharded as {sharding.spec} over the "
            f"mesh {dict(mesh.shape)}. Change the specification, or the sizes of the axes. JAX "
            f"says: {error}"
        ) from error
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)


def _is_key(leaf: _Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _bytes(struct: jax.ShapeDtypeStruct) -> int:
    if _is_key(struct):
        struct = jax.eval_shape(jax.random.key_data, struct)
    shape = struct.shape if struct.sharding is None else struct.sharding.shard_shape(struct.shape)
    count = 1
    for size in shape:
        count *= size
    # Count in bits, and round up: two elements of int4 or float4 share a byte.
    bits = jax.dtypes.itemsize_bits(struct.dtype)
    return -(-count * bits // 8)


def _own_donation(step: Callable[..., Any], args: tuple[Any, ...]) -> frozenset[int]:
    """Return the arguments that a jitted step donates by itself."""
    if not isinstance(step, jax.stages.Wrapped):
        return frozenset()
    donated: set[int] = set()
    infos = list(step.trace(*args).args_info[0])
    for number, arg in enumerate(args):
        # `args_info` leaves out static arguments, and does not say which arguments are static. The
        # others are matched in order, by their structure and shapes.
        if infos and _looks_like(infos[0], arg):
            leaves = jax.tree.leaves(infos.pop(0), is_leaf=_is_info)
            donated |= {number for info in leaves if info.donated}
    return frozenset(donated)


def _looks_like(info: object, arg: object) -> bool:
    described, treedef = jax.tree.flatten(info, is_leaf=_is_info)
    given = jax.tree.leaves(arg)
    return treedef == jax.tree.structure(arg) and all(
        _is_info(a) and tuple(a.shape) == np.shape(b) for a, b in zip(described, given, strict=True)
    )


def _is_info(node: object) -> bool:
    return hasattr(node, "donated")


def _export(
    jitted: jax.stages.Wrapped,
    structs: list[jax.ShapeDtypeStruct],
    platform: str,
    step: Callable[..., Any],
) -> export.Exported:
    allowed: set[str] = set()
    while True:
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in sorted(allowed)]
        try:
            return export.export(jitted, platforms=(platform,), disabled_checks=checks)(*structs)
        except Exception as error:
            # JAX refuses to export custom calls whose meaning may change between versions. It
            # allows them only by name, and gives the names only in the message.
            unknown = _unguaranteed(str(error)) - allowed
            if unknown:
                # The compiler is of this very version, so no guarantee across versions is needed.
                allowed |= unknown
                continue
            name = getattr(step, "__name__", repr(step))
            raise PreflightError(
                f"{name} could be traced but not lowered for {platform}. An operation in it has no "
                f"implementation there, or is bound to this machine. "
                "Take it out of the step, or ask for a platform that has it. JAX says:\n"
                f"{type(error).__name__}: {error}"
            ) from error


def _fingerprint(exported: export.Exported) -> str:
    # Locations are not part of the computation. With them, every edit that moves a line would
    # recompile the same program.
    text = exported.mlir_module()
    text = re.sub(r"^#loc.*\n", "", text, flags=re.MULTILINE)
    # A block's arguments have locations with a name: loc("scatter-add:"(#loc172)).
    text = re.sub(r' loc\((?:"[^"]*"\()?(?:#loc\d*|unknown)\)?\)', "", text)
    return hashlib.sha256(text.encode()).hexdigest()


def _unguaranteed(message: str) -> set[str]:
    """Return the custom calls that JAX refuses to export because it promises no stable meaning."""
    if "custom calls whose targets have no compatibility guarantees" not in message:
        return set()
    return set(re.findall(r"custom_call\W+@?([\w.$]+)", message))


# A callback is a pointer into this process. In the compiled program of another process it would
# point nowhere.
_CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})


def refuse_callbacks(jaxpr: core.Jaxpr, platform: str) -> None:
    """Raise for the first callback, with the user's line that made it."""
    for equation in equations(jaxpr):
        if equation.primitive.name in _CALLBACKS:
            raise PreflightError(
                f"the step calls back into Python ({equation.primitive.name}{_line(equation)}), "
                f"which cannot be compiled for {platform} in another process. Take "
                "jax.debug.print, io_callback and the like out of the step for this; for "
                "Equinox's error_if set the environment variable EQX_ON_ERROR=off."
            )


def _line(equation: core.JaxprEqn) -> str:
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if "site-packages" not in frame.file_name:
            return f" at {frame.file_name}:{frame.line_num}"
    return ""
