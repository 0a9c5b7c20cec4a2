"""Run a stack of layers forward and backward, with one layer's gradient at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.lax import bitcast_convert_type
from jaxtyping import PyTree

Call = Callable[[Any, Any, Any], Any]
"""Maps a layer's parameters, its input and the parameters outside the stack to its output."""


def take(tree: PyTree, number: jax.Array) -> PyTree:
    """Return one layer of stacked arrays."""
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), tree
    )


def put(tree: PyTree, layer: PyTree, number: jax.Array) -> PyTree:
    """Return stacked arrays with one layer replaced; inside a loop this happens in place."""

    def of(leaf: jax.Array, new: jax.Array) -> jax.Array:
        if leaf.dtype != jnp.bfloat16:
            return _put(leaf, new, number)
        return jax.lax.platform_dependent(leaf, new, number, cpu=_put_bits, default=_put)

    return jax.tree.map(of, tree, layer)


def _put(leaf: jax.Array, new: jax.Array, number: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(leaf, new, number, 0)


def _put_bits(leaf: jax.Array, new: jax.Array, number: jax.Array) -> jax.Array:
    """Put a layer by its bits, for CPUs.

    XLA:CPU cannot update bfloat16 in place: it would convert the whole stack in every iteration.
    Other backends update the values directly, since XLA:TPU copies the whole stack to read its
    bits.
    """
    old, word = (bitcast_convert_type(array, jnp.uint16) for array in (leaf, new))
    return bitcast_convert_type(_put(old, word, number), jnp.bfloat16)


def forward(call: Call, layers: PyTree, x: PyTree, outer: PyTree) -> tuple[PyTree, PyTree]:
    """Return the output of the last layer and the input of each, which the backward pass needs."""
    return jax.lax.scan(lambda x, layer: (call(layer, x, outer), x), x, layers)


def backward(
    call: Call,
    frozen: PyTree,
    inputs: PyTree,
    outer: PyTree,
    used: Sequence[bool],
    ct: PyTree,
    visit: Callable[[Any, Any, Any], Any],
    stack: PyTree,
    layer_of: Callable[[Any, Any], Any],
) -> tuple[Any, list[Any], Any]:
    """Run the backward pass, from the last layer to the first.

    Args:
        call: One layer.
        frozen: The stacked arrays that are not trained.
        inputs: The input of each layer, stacked.
        outer: Trained parameters outside the stack.
        used: Whether to differentiate with respect to each leaf of `outer`.
        ct: The cotangent of the last layer's output.
        visit: Returns the stack for the next iteration, given the stack, a layer's number and the
            layer's gradients.
        stack: The arrays that iterations carry and change.
        layer_of: Returns a layer's trained parameters, given the stack and the layer's number.

    Returns:
        The cotangent of the first layer's input; the gradients of the used leaves of `outer`,
        summed over layers; the stack.
    """
    length = jax.tree.leaves(inputs)[0].shape[0]
    leaves, treedef = jax.tree.flatten(outer)
    # Only the gradients of arrays that a layer reads are summed over layers. The others would be
    # zeros, perhaps as large as an embedding, and every iteration would add to them.
    chosen = [leaf for leaf, is_used in zip(leaves, used, strict=True) if is_used]

    def whole(chosen: Sequence[jax.Array]) -> PyTree:
        rest = iter(chosen)
        pairs = zip(leaves, used, strict=True)
        return treedef.unflatten([next(rest) if is_used else leaf for leaf, is_used in pairs])

    def iteration(done: jax.Array, carry: tuple[Any, list[Any], Any]) -> tuple[Any, list[Any], Any]:
        ct, sums, stack = carry
        # Each layer is recomputed from its input, so that only one layer's residuals exist.
        number = length - 1 - done
        others = take(frozen, number)

        def run(layer: PyTree, x: PyTree, chosen: Sequence[Any]) -> PyTree:
            return call(eqx.combine(layer, others), x, whole(chosen))

        _, pull = jax.vjp(run, layer_of(stack, number), take(inputs, number), chosen)
        grads, ct, more = pull(ct)
        return ct, [a + b for a, b in zip(sums, more, strict=True)], visit(stack, number, grads)

    # This is a loop and not a scan, so that parameters and state are carried and updated in place.
    # For inputs and outputs of a scan, XLA would hold two copies of each.
    return jax.lax.fori_loop(0, length, iteration, (ct, [jnp.zeros_like(c) for c in chosen], stack))
