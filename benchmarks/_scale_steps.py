"""One fully sharded training step of a decoder in several recipes, for any number of devices.

Parameters and optimizer state are divided over all devices, and so is the batch. Every activation
is pinned to the device of its examples, so that it is the weights that travel.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import halfstep
from benchmarks import _llama
from halfstep import optim

DONATED = (0, 1)
"""Parameters and optimizer state."""
RUN = 32
"""Elements of a last axis that share a scale in a compressed state, and so a device."""
GROUP = 256
"""Devices in a group."""
ALL, GROUPS = "all devices", "groups of 256"
"""Over what parameters and state are divided; every group has all of them."""
SHARDS, REPLICAS = "fsdp", "replica"
RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Size:
    """A decoder's shape, and how much of the batch each device has."""

    name: str
    layers: int
    width: int
    hidden: int
    vocabulary: int
    tokens: int
    examples: int
    """Sequences on each device."""

    def params(self) -> Any:
        """All parameters in float32."""
        shapes = _llama.shapes(
            layers=self.layers, width=self.width, hidden=self.hidden, vocabulary=self.vocabulary
        )
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), shapes)

    @property
    def count(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.params()))


def axes(devices: int, layout: str) -> dict[str, int]:
    """The mesh: `ALL` or `GROUPS`.

    No axis of a matrix is divisible by thousands, so that over all devices several are divided.
    """
    first = math.gcd(devices, GROUP)
    rest = devices // first
    if layout == GROUPS:
        return {SHARDS: first, REPLICAS: rest}
    second = math.gcd(rest, 4)
    sizes = (first, second, rest // second)
    return {f"{SHARDS}{i or ''}": size for i, size in enumerate(sizes) if i == 0 or size > 1}


def spec(shape: tuple[int, ...], mesh: AbstractMesh, *, stacked: bool) -> P:
    """Each axis of the mesh divides the first axis of a matrix that it can, and that of layers not.

    Vectors are whole on every device: together they are a ten-thousandth of the model.
    """
    start = int(stacked)
    if len(shape) < start + 2:
        return P()
    free = list(shape)
    free[-1] //= RUN
    taken: list[tuple[str, ...]] = [() for _ in shape]
    divided = {name: size for name, size in mesh.shape.items() if name != REPLICAS}
    for name, size in divided.items():
        for axis in range(start, len(shape)):
            if free[axis] % size == 0:
                free[axis] //= size
                taken[axis] += (name,)
                break
        else:
            raise ValueError(
                f"a matrix of {shape} cannot be divided over {divided} devices; choose "
                "widths that are multiples of larger powers of two."
            )
    return P(*(names or None for names in taken))


def placed(params: Any, mesh: AbstractMesh) -> Any:
    """Parameters, divided over all devices."""

    def of(path: Any, leaf: Any) -> Any:
        stacked = path[0].key == "layers"
        sharding = NamedSharding(mesh, spec(leaf.shape, mesh, stacked=stacked))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(of, params)


def prepared(prepare: Callable[..., Any], params: Any) -> Any:
    """The shapes of what an optimizer makes of placed parameters."""
    return jax.eval_shape(optim.sharded(prepare, params), params)


def explicit(tree: Any) -> Any:
    """The same shapes, divided alike, on a mesh with explicit axes."""

    def of(leaf: Any) -> Any:
        old = leaf.sharding.mesh
        kinds = (AxisType.Explicit,) * len(old.axis_names)
        mesh = AbstractMesh(old.axis_sizes, old.axis_names, axis_types=kinds)
        where = NamedSharding(mesh, leaf.sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return jax.tree.map(of, tree)


def beside(state: Any, params: Any) -> Any:
    """A state's shapes with shardings that follow those of the parameters."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        state,
        optim.state_shardings(state, params),
    )


@dataclasses.dataclass(frozen=True)
class Model:
    """The decoder's functions on a mesh, and its loss."""

    mesh: AbstractMesh
    params: Any
    """Divided over the devices; float32."""
    batch: Any

    def pin(self, x: Any) -> Any:
        where = NamedSharding(self.mesh, P(self.mesh.axis_names))
        return jax.lax.with_sharding_constraint(x, where)

    def functions(self) -> dict[str, Callable[..., Any]]:
        """As `optim.release` wants them."""
        return {
            "first": functools.partial(_llama.first, pin=self.pin),
            "layer": functools.partial(_llama.layer, pin=self.pin),
            "last": functools.partial(_llama.last, pin=self.pin),
        }

    def loss(self, params: Any, ids: Any) -> Any:
        """A scan over layers that are recomputed on the way back."""
        parts = self.functions()
        outer = params["outer"]

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def body(x: Any, layer: Any) -> Any:
            return parts["layer"](layer, x, outer, ids), None

        x, _ = jax.lax.scan(body, parts["first"](outer, ids), params["layers"])
        return parts["last"](outer, x, ids)


def model(size: Size, devices: int, layout: str = ALL) -> Model:
    """The decoder over so many devices."""
    sizes = axes(devices, layout)
    mesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    rows = NamedSharding(mesh, P(mesh.axis_names))
    shape = (devices * size.examples, size.tokens + 1)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    return Model(mesh, placed(size.params(), mesh), batch)


Made = tuple[Callable[..., Any], tuple[Any, ...]]
"""A step and its arguments: parameters, optimizer state, batch."""


def _step(model: Model, policy: str, optimizer: Any) -> Callable[..., Any]:
    def step(params: Any, opt_state: Any, ids: Any) -> Any:
        loss, _, finite, grads = halfstep.filter_value_and_grad(
            model.loss, policy=policy, check_finite=True
        )(params, ids)
        params, opt_state = halfstep.optimizer_update(params, optimizer, opt_state, grads, finite)
        return params, opt_state, loss

    return step


def _plain(model: Model, policy: str) -> Made:
    """AdamW of Optax; parameters and state in float32."""
    optimizer = optax.adamw(RATE)
    state = beside(jax.eval_shape(optimizer.init, model.params), model.params)
    return _step(model, policy, optimizer), (model.params, state, model.batch)


def _flash(model: Model, policy: str) -> Made:
    """AdamW in 5 bytes a parameter."""
    optimizer = optim.flash_adamw(RATE)
    shapes, state = prepared(optimizer.prepare, model.params)
    params = placed(shapes, model.mesh)
    return _step(model, policy, optimizer), (params, beside(state, params), model.batch)


def _released(model: Model, policy: str) -> Made:
    """The same, each layer updated as soon as its gradient is there."""
    parts = model.functions()
    layer, last = (halfstep.autocast(parts[name], policy) for name in ("layer", "last"))
    # Between layers activations are bfloat16. Autocast rewrites what is written in float32, and
    # leaves products of bfloat16 activations as they are.
    released = optim.release(
        lambda params, x, outer, ids: layer(params, _wide(x), outer, ids).astype(x.dtype),
        optim.flash_adamw(RATE),
        first=parts["first"],
        last=lambda outer, x, ids: last(outer, _wide(x), ids),
    )

    def step(params: Any, opt_state: Any, ids: Any) -> Any:
        return released(params, opt_state, ids)

    shapes, state = prepared(released.prepare, model.params)
    params = placed(shapes, model.mesh)
    placed_state = optim.ReleaseState(
        outer=beside(state.outer, params["outer"]), layers=beside(state.layers, params["layers"])
    )
    return step, (params, placed_state, model.batch)


def _wide(x: Any) -> Any:
    return x.astype(jnp.float32)


RECIPES: Mapping[str, Callable[[Model], Made]] = MappingProxyType(
    {
        "f32": lambda model: _plain(model, "f32"),
        "bf16": lambda model: _plain(model, "bf16"),
        "f8, flash": lambda model: _flash(model, "f8"),
        "f8, flash, release": lambda model: _released(model, "f8"),
    }
)
"""What is compared, by name."""
