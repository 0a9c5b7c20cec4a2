"""Models that are as they should be have no findings."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import halfstep
from tests.models import gpt as _gpt, vit as _vit

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_a_vision_transformer(policy: str):
    model = eqx.filter_eval_shape(_vit.ViT, blocks=2, key=jax.random.key(0))
    images = jax.ShapeDtypeStruct((256, 32, 32, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((256,), jnp.int32)
    report = halfstep.explain(_vit.loss, policy)(model, images, labels)
    report.check(low=1.0, max_findings=0)
    assert report.totals.stored is not None
    assert report.totals.stored["f32"] < 0.01 * sum(report.totals.stored.values())
    # Every operation has a line of the model's own file.
    assert {entry.source.file for entry in report.operations} == {"tests/models/vit.py"}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_a_scanned_language_model(policy: str, remat: bool):
    params = jax.eval_shape(functools.partial(_gpt.init, layers=4), key=jax.random.key(0))
    ids = jax.ShapeDtypeStruct((8, 1025), jnp.int32)
    report = halfstep.explain(functools.partial(_gpt.loss, remat=remat), policy)(params, ids)
    report.check(low=1.0, max_findings=0)
    assert report.name == "loss"
    assert report.totals.stored is not None
    assert report.totals.stored.get("f32", 0) < 2**21
