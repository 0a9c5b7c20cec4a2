"""Choose what is made again for the backward pass, where no rule says it.

A function that scans over layers stores the result of each contraction, and what lies between two
of them is made again. In the body of a loop this moves fewest bytes, because XLA copies each stored
value into a stack and out of it again. Written out, the same layers move fewer bytes if only
float32 between contractions is made again.

One kind of product is made again as well: the scores of attention and their like, which are large
and made of small factors. To store and read one of their numbers takes an accelerator longer than
to multiply again.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from halfstep._autocast.plans import Settings
from halfstep._autocast.state import contracts
from halfstep._autocast.stored.saves import Again
from halfstep._program import Constant, Graph, Node, Remat, Scan, While, size

# The result has so many times the numbers of the factors: else it is as large as what it is made
# of, which is stored anyway.
_GROWTH = 2
# FLOPs of an H100 in the time in which it reads or writes one byte. A B200 has 293, a TPU v5p 166,
# a v5e 240 and a v6e 560. A traced program may run on any of them.
_RIDGE = 295
# Products that are made again are at most so much of a body's. The backward pass has two products
# for each one of the forward pass, so this is 8 % of all.
_SHARE = 0.24


def chosen_for(settings: Settings, graph: Graph) -> Settings:
    """Return settings that say what is made again of a function."""
    saves = settings.saves
    # A product in 8 or 4 bits may have state, which an island does not hand in.
    has_state = any(rule.outcome == "recompute" for rule in saves.rules) and settings.recipes
    most = not saves.by_graph or has_state or (settings.rounds and _has_layers(graph))
    return _making(settings, Again.MOST) if saves.is_own and most else settings


def without_layers(settings: Settings) -> Settings:
    """Return settings for a function that is not one over layers, whatever is around it."""
    saves = settings.saves
    lowers = saves.again is Again.MOST and saves.by_graph
    return _making(settings, Again.WIDE) if lowers else settings


def _making(settings: Settings, again: Again) -> Settings:
    return dataclasses.replace(settings, saves=dataclasses.replace(settings.saves, again=again))


def _has_layers(graph: Graph) -> bool:
    return any(
        has_products(node) or any(map(_has_layers, node.graphs))
        for node in graph.nodes
        if node.graphs
    )


def has_products(node: Node) -> bool:
    """Return whether an operation is a `scan` whose body multiplies, such as one over layers.

    Not one that holds a loop over a state, as a layer of a Mamba does. That loop stores what it
    reads in any case, so the products that this is made of would be stored in addition.
    """
    if not isinstance(node.structure, Scan):
        return False
    # Of a `jax.checkpoint` of the user's nothing is chosen. On a v5e the rest of such a model takes
    # less in islands: 3,215 MiB for a GPT, and 3,482 in segments.
    body = [inner for inner in node.graphs[-1].nodes if not isinstance(inner.structure, Remat)]
    loops = [inner for inner in body if isinstance(inner.structure, Scan | While)]
    return any(map(contracts, body)) and all(map(has_products, loops))


def cheap_products(
    graph: Graph, compute: np.dtype, is_weight: Callable[[int], bool]
) -> frozenset[int]:
    """Return the products of activations whose results are made again.

    Args:
        graph: A function.
        compute: The dtype of the results.
        is_weight: Whether a value is a parameter, or made of parameters and constants alone.
    """
    products = [index for index, node in enumerate(graph.nodes) if node.name == "dot_general"]
    cheap = [
        index
        for index in products
        if _is_cheap(graph.nodes[index], graph, compute)
        and not any(isinstance(x, Constant) or is_weight(x) for x in graph.nodes[index].ins)
    ]
    again, every = (sum(_flops(graph.nodes[i], graph) for i in some) for some in (cheap, products))
    return frozenset(cheap) if again <= _SHARE * every else frozenset()


def _is_cheap(node: Node, graph: Graph, dtype: np.dtype) -> bool:
    factors = sum(size(graph.aval(operand)) for operand in node.ins)
    result = size(graph.avals[node.outs[0]])
    return result >= _GROWTH * factors and _flops(node, graph) <= _RIDGE * result * dtype.itemsize


def _flops(node: Node, graph: Graph) -> int:
    (contracted, _), _ = node.params["dimension_numbers"]
    left = graph.aval(node.ins[0])
    shape = tuple(left.shape[axis] for axis in contracted)
    depth = size(jax.ShapeDtypeStruct(shape, left.dtype))
    return 2 * depth * size(graph.avals[node.outs[0]])
