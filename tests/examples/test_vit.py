"""The vision transformer: its shapes, its patches, and that a policy reaches all of it."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from examples._vit import PRESETS, ViT, patches
from examples.vit_fashion_mnist import loss
from tests._jaxprs import contractions

SIZES: dict[str, int] = {"patch": 4, "width": 16, "hidden": 32, "heads": 2, "blocks": 2}


def small(**changes: int) -> ViT:
    """A model of shapes and dtypes alone."""
    make = functools.partial(ViT, (8, 8, 3), 10, **(SIZES | changes))
    return eqx.filter_eval_shape(make, key=jax.random.key(0))


def test_patches_are_squares_row_by_row():
    image = jnp.arange(4 * 6 * 2).reshape(4, 6, 2)
    cut = np.asarray(patches(image, 2))
    assert cut.shape == (6, 8)
    assert cut[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert cut[1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]
    assert cut[3].tolist() == [24, 25, 26, 27, 36, 37, 38, 39]


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str):
    make = functools.partial(ViT, (28, 28, 1), 10, **PRESETS[name])
    model = eqx.filter_eval_shape(make, key=jax.random.key(0))
    logits = eqx.filter_eval_shape(model, jnp.zeros((28, 28, 1)))
    assert logits == jax.ShapeDtypeStruct((10,), jnp.float32)
    assert len(model.blocks) == PRESETS[name]["blocks"]


def test_the_paper_preset_is_the_papers():
    sizes = {"patch": 4, "width": 256, "hidden": 800, "heads": 8, "blocks": 6}
    assert PRESETS["paper"] == sizes


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="multiples of the patch; got images of 8 x 8 and patch=3"):
        small(patch=3)
    with pytest.raises(ValueError, match="multiple of the heads; got 16 and 3"):
        small(heads=3)


def dots(jaxpr: Any) -> list[set[str]]:
    """The dtypes that go into each contraction, nested programs included."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append({str(x.aval.dtype) for x in equation.invars})
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            found += dots(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.parametrize(
    ("policy", "dtype"), [("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16")]
)
def test_a_policy_reaches_every_contraction(policy: str, dtype: str):
    gradient = halfstep.filter_value_and_grad(
        loss, halfstep.StaticLossScaling(2**10), policy=policy
    )
    images, labels = jnp.zeros((2, 8, 8, 3)), jnp.zeros(2, jnp.int32)
    jaxpr, _, _ = eqx.filter_make_jaxpr(gradient)(small(), images, labels)
    found = dots(jaxpr.jaxpr)
    # Forward: embedding, head, and in each block 4 projections, 2 in attention and 2 in the
    # perceptron. Backward: two for each, but one for the embedding, whose input has no gradient.
    forward = 2 + 2 * 8
    assert len(found) == forward + 2 * forward - 1
    assert all(types == {dtype} for types in found)


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_the_loss_is_float32_and_its_products_are_not(policy: str):
    images, labels = jnp.zeros((2, 8, 8, 3), jnp.uint8), jnp.zeros(2, jnp.int32)
    params, static = eqx.partition(small(), eqx.is_array)

    def low(params, images, labels):
        return halfstep.autocast(loss, policy)(eqx.combine(params, static), images, labels)

    value = jax.eval_shape(low, params, images, labels)
    assert value == jax.ShapeDtypeStruct((), jnp.float32)
    dtype = str(halfstep.FORMATS[policy].dtype)
    assert set(contractions(low, params, images, labels)) == {dtype}
