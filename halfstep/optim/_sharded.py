"""Show `init` and `prepare` how parameters are divided, where JAX traces them and does not."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from halfstep._base import checked
from halfstep.optim._layout import one_mesh, sharding_of


@checked
def sharded(make: Callable[[Any], Any], params: Any) -> Callable[[Any], Any]:
    """Make a state whose groups of 32 never lie on two devices, also inside `jax.jit`.

    `init` and `prepare` read from arrays how these are divided among devices, and choose groups
    that fit. JAX does not show it to functions that it traces (`jax.jit`, `jax.eval_shape`,
    `jax.vmap`), unless the axes of the mesh are explicit. There, this function tells them.

    Args:
        make: `init` or `prepare` of any optimizer of this package, or of `optim.release`.
        params: Parameters, or `jax.ShapeDtypeStruct`s, with shardings over one mesh. Only their
            structure and their shardings are used.

    Returns:
        A function like `make`. Its results are divided like the parameters.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep import optim
        from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

        mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
        where = NamedSharding(mesh, PartitionSpec("data"))
        params = {"w": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16, sharding=where)}
        init = optim.flash_adamw(1e-3).init
        # Four devices have 16 rows each, so that groups must lie along the columns.
        told = jax.eval_shape(optim.sharded(init, params), params)
        assert told.first["w"].scale.shape == (64, 8)
        assert jax.eval_shape(init, params).first["w"].scale.shape == (2, 256)
        ```
    """
    mesh = one_mesh([sharding_of(leaf) for leaf in jax.tree.leaves(params)])
    plain = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    leaves, structure = jax.tree.flatten(params)
    places = [sharding_of(leaf) or NamedSharding(mesh, PartitionSpec()) for leaf in leaves]

    def of(given: Any) -> Any:
        leaves, treedef = jax.tree.flatten(given)
        if treedef != structure:
            raise ValueError(
                "the parameters must have the structure of those that `sharded` was given, "
                f"{structure}; got {treedef}."
            )
        arrays, rest = eqx.partition(leaves, eqx.is_array)
        specs = [
            None if leaf is None else where.spec for leaf, where in zip(arrays, places, strict=True)
        ]
        static: list[Any] = []

        def traced(arrays: PyTree) -> Any:
            def explicit(arrays: PyTree) -> Any:
                made = make(treedef.unflatten(eqx.combine(arrays, rest)))
                dynamic, others = eqx.partition(made, eqx.is_array)
                static.append(others)
                return dynamic

            if not isinstance(mesh, AbstractMesh) and not plain.explicit_axes:
                # This names the devices: arrays that are made inside the program have none yet.
                arrays = [
                    None if leaf is None else jax.lax.with_sharding_constraint(leaf, where)
                    for leaf, where in zip(arrays, places, strict=True)
                ]
            # Here axes become explicit, so that JAX keeps the sharding of every array in its type.
            with jax.sharding.use_abstract_mesh(plain):
                if plain.explicit_axes:
                    return explicit(jax.sharding.reshard(arrays, specs))
                return jax.sharding.explicit_axes(explicit, in_sharding=(specs,))(arrays)

        # Compiled even if the caller compiles nothing: only traced arrays change the kind of axes.
        made = jax.jit(traced)(arrays)
        return eqx.combine(made, static[-1])

    return of
