"""`autocast`: an unmodified float32 function in mixed precision."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from halfstep._autocast._graph import graph_of
from halfstep._autocast._kinds import Kind, is_subject
from halfstep._autocast._plan import plan
from halfstep._autocast._run import run
from halfstep._autocast._types import Settings
from halfstep._leaves import is_array
from halfstep._policy import Policy, as_policy


def autocast(
    func: Callable[..., Any],
    policy: Policy | str = "bf16",
    *,
    params: int | Sequence[int] = 0,
    islands: bool = True,
) -> Callable[..., Any]:
    """Rewrite a function: contractions in the compute dtype, sensitive operations in float32.

    The function is traced as it is written, in float32, and each of its operations runs in the
    precision that suits it: contractions (dots and convolutions) take their operands in the compute
    dtype; exponentials, logarithms, powers, divisions and sums run in float32; everything else in
    the widest dtype of its operands, where parameters and constants do not count. Loops, branches,
    calls and functions with derivatives of their own are rewritten inside. Results have the dtypes
    that they have without it.

    What runs in float32 between two contractions is an *island*: what goes in and out is stored in
    the compute dtype, and the inside is computed again for the gradient. So float32 is never kept
    for the backward pass, and a norm or a softmax in float32 costs no memory.

    Args:
        func: Any function that can be traced.
        policy: A `Policy` or its text; its compute dtype is used.
        params: Which positional arguments hold parameters. Their floating-point arrays are used in
            the compute dtype where they meet activations, and are cast at that place, so that their
            gradients add up in float32. All other arguments (targets, positions) stay as they are
            until they enter a contraction.
        islands: Whether float32 regions are computed again instead of stored.

    Returns:
        A function of the same arguments.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def loss(params, x, y):
            hidden = jax.nn.gelu(x @ params["up"])
            return jnp.mean((jax.nn.softmax(hidden @ params["down"]) - y) ** 2)


        params = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 4))}
        x, y = jnp.ones((2, 8)), jnp.zeros((2, 4))
        value, grads = jax.value_and_grad(halfstep.autocast(loss, "bf16"))(params, x, y)
        assert value.dtype == grads["up"].dtype == jnp.float32
        ```
    """
    settings = Settings(np.dtype(as_policy(policy).compute), islands)
    numbers = {params} if isinstance(params, int) else set(params)

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if settings.compute.itemsize >= 4:
            return func(*args, **kwargs)
        pairs, treedef = jtu.tree_flatten_with_path((args, kwargs))
        dynamic = [is_array(leaf) for _, leaf in pairs]
        arrays = [leaf for (_, leaf), keep in zip(pairs, dynamic, strict=True) if keep]
        static: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            given = iter(values)
            leaves = [
                next(given) if keep else leaf
                for (_, leaf), keep in zip(pairs, dynamic, strict=True)
            ]
            args, kwargs = jtu.tree_unflatten(treedef, leaves)
            results, out_treedef = jtu.tree_flatten(func(*args, **kwargs))
            traced = [eqx.is_array(result) for result in results]
            static[:] = [
                out_treedef,
                [None if keep else leaf for leaf, keep in zip(results, traced, strict=True)],
                traced,
            ]
            return [leaf for leaf, keep in zip(results, traced, strict=True) if keep]

        graph = graph_of(jax.make_jaxpr(flat)(*arrays))
        soft = [
            len(path) > 1 and path[0].idx == 0 and path[1].idx in numbers
            for (path, _), keep in zip(pairs, dynamic, strict=True)
            if keep
        ]
        kinds = [
            _kind(graph.avals[number], parameter, settings)
            for number, parameter in zip(graph.inputs, soft, strict=True)
        ]
        made = plan(graph, kinds, settings)
        results = iter(run(made, arrays, [Kind.WIDE] * len(graph.outputs)))
        out_treedef, others, traced = static
        return jtu.tree_unflatten(
            out_treedef,
            [next(results) if keep else leaf for leaf, keep in zip(others, traced, strict=True)],
        )

    return wrapped


def _kind(aval: Any, parameter: bool, settings: Settings) -> Kind:
    if not is_subject(aval, settings.compute):
        return Kind.OTHER
    return Kind.SOFT if parameter else Kind.WIDE
