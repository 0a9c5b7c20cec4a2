"""`halfstep.compat.jmp`: jmp's documented calls run, and what jmp gets wrong is right."""

import dataclasses
import inspect
import io
import pickle
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import halfstep
import halfstep.compat.jmp as compat

NAMES = {
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
}
TEXTS = [
    *("half", "f16", "float16", "bf16", "bfloat16", "full", "f32", "float32", "f64", "float64"),
    *("c=f16", "p=f16,c=f16", "p=f16,c=bf16", "p=half", "c=half,o=full", "o=bf16", "c=f32,p=bf16"),
    *("params=float32,compute=float16,output=float32", "p=f32,compute=half,output=f64"),
]


# The names.


def test_public_names():
    assert set(compat.__all__) == NAMES
    assert all(hasattr(compat, name) for name in NAMES)


def test_names_and_signatures_are_those_of_jmp():
    jmp = pytest.importorskip("jmp")
    public = {name for name, value in vars(jmp).items() if not isinstance(value, types.ModuleType)}
    assert {name for name in public if not name.startswith("_")} == NAMES
    for name in NAMES - {"LossScale", "NoOpLossScale"}:
        theirs = inspect.signature(getattr(jmp, name)).parameters.values()
        ours = inspect.signature(getattr(compat, name)).parameters.values()
        described = [(p.name, p.kind, p.default is p.empty) for p in ours]
        assert described == [(p.name, p.kind, p.default is p.empty) for p in theirs], name


# Policies, as the documentation has them.


def test_documented_policy():
    half, full = jnp.float16, jnp.float32
    policy = compat.Policy(compute_dtype=half, param_dtype=full, output_dtype=half)

    def layer(params: dict, x: Any) -> Any:
        params, x = policy.cast_to_compute((params, x))
        assert x.dtype == params["w"].dtype == half
        return policy.cast_to_output(x @ params["w"] + params["b"])

    params = {
        "w": jnp.ones([3, 2], dtype=policy.param_dtype),
        "b": jnp.ones([4, 2], policy.param_dtype),
    }
    assert params["w"].dtype == full
    assert layer(params, jnp.ones([4, 3])).dtype == half
    policy = policy.with_output_dtype(full)
    assert layer(params, jnp.ones([4, 3])).dtype == full
    assert policy.cast_to_param(policy.cast_to_compute(params))["b"].dtype == full
    assert str(policy) == "p=full,c=f16,o=full"


def test_documented_policy_texts():
    policy = compat.get_policy("params=float32,compute=float16,output=float32")
    assert policy == compat.Policy(jnp.float32, jnp.float16, jnp.float32)
    assert compat.get_policy("float16") == compat.Policy(jnp.float16, jnp.float16, jnp.float16)
    # Tests run on CPU, where jmp's half is float16.
    assert compat.get_policy("half") == compat.get_policy("f16")
    # Unlike in halfstep, a bare name means everything.
    assert compat.get_policy("bf16").param_dtype == jnp.bfloat16
    assert halfstep.Policy.parse("bf16").param == jnp.float32


@pytest.mark.parametrize("text", TEXTS)
def test_policy_texts_mean_what_they_do_in_jmp(text: str):
    policy = compat.get_policy(text)
    assert compat.get_policy(str(policy)) == policy
    theirs = pytest.importorskip("jmp").get_policy(text)
    assert str(policy) == str(theirs)
    for field in dataclasses.fields(theirs):
        assert getattr(policy, field.name) is getattr(theirs, field.name)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("float15", "unknown format 'float15'.*Did you mean 'float16'"),
        ("c=f16,x=f32", "'x=f32' in the policy .* is not known"),
        ("c=f16,keep=state", "For `keep`, use halfstep.Policy"),
        ("c", "unknown format 'c'"),
    ],
)
def test_get_policy_refuses(text: str, match: str):
    with pytest.raises(ValueError, match=match):
        compat.get_policy(text)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_half_follows_the_backend(platform: str, monkeypatch: pytest.MonkeyPatch):
    devices = [types.SimpleNamespace(platform=platform)]
    half = jnp.bfloat16 if platform == "tpu" else jnp.float16
    with monkeypatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: devices)
        assert compat.half_dtype() is half
        assert compat.get_policy("p=f32,c=half").compute_dtype is half
        assert compat.Policy("full", "half", "half").output_dtype is half
        # NumPy calls float16 "half" too; the dtype itself means float16 everywhere.
        exact = compat.Policy(np.dtype(np.float16), jnp.float16, "f16")
        assert exact == compat.Policy(jnp.float16, jnp.float16, jnp.float16)
        assert exact.param_dtype is jnp.float16
        with halfstep.half_precision("f16"):
            assert compat.get_policy("half").param_dtype is half
    assert compat.half_dtype() is jnp.float16


def test_policy_takes_dtypes_in_any_form():
    policy = compat.Policy(np.dtype(np.float32), np.float16, "bf16")
    assert str(policy) == "p=full,c=f16,o=bf16"  # jmp: KeyError.
    assert policy == compat.Policy(jnp.float32, jnp.float16, jnp.bfloat16)
    assert hash(policy) == hash(compat.Policy(jnp.float32, jnp.float16, jnp.bfloat16))
    assert dataclasses.replace(policy, output_dtype=jnp.float32).output_dtype is jnp.float32
    assert pickle.loads(pickle.dumps(policy)) == policy
    with pytest.raises(dataclasses.FrozenInstanceError, match="param_dtype"):
        policy.param_dtype = jnp.float16  # pyright: ignore[reportAttributeAccessIssue]


def test_policy_passes_through_jit():
    policy = compat.get_policy("c=bf16")
    assert jtu.tree_leaves(policy) == []
    returned, x = jax.jit(lambda policy, x: (policy, policy.cast_to_compute(x)))(
        policy, jnp.ones(2)
    )
    assert returned == policy
    assert x.dtype == jnp.bfloat16


class Pair(NamedTuple):
    left: Any
    right: Any


OTHERS = {
    "key": jax.random.key,
    "legacy_key": lambda seed: jax.random.PRNGKey(seed),
    "int": lambda seed: jnp.full(2, seed),
    "bool": lambda seed: jnp.full(2, seed == 1),
    "complex": lambda seed: jnp.full(2, seed + 1j),
    "none": lambda _: None,
    "text": lambda _: "text",
    "function": lambda _: jnp.tanh,
}


@pytest.mark.rows(4)
@pytest.mark.parametrize("other", OTHERS)
def test_leaves_of_every_kind(other: str):
    a, b = (Pair(jnp.full(2, float(seed)), {"x": OTHERS[other](seed)}) for seed in (1, 2))
    policy = compat.get_policy("p=f32,c=bf16,o=f16")
    for cast, dtype in (
        (policy.cast_to_param, jnp.float32),
        (policy.cast_to_compute, jnp.bfloat16),
        (policy.cast_to_output, jnp.float16),
        (compat.cast_to_half, jnp.float16),
        (compat.cast_to_full, jnp.float32),
    ):
        out = cast(a)
        assert out.left.dtype == dtype
        assert out.right["x"] is a.right["x"]
    assert compat.all_finite(a)
    assert not compat.all_finite(a._replace(left=jnp.array([jnp.inf])))
    for pred, chosen in ((True, a), (False, b)):
        out = compat.select_tree(jnp.asarray(pred), a, b)
        assert jtu.tree_all(jtu.tree_map(lambda x, y: np.all(x == y), out, chosen))
    for scale in (compat.DynamicLossScale(8.0), compat.StaticLossScale(8.0)):
        scaled = scale.scale(a)
        assert (scaled.left == 8).all()
        if other != "complex":
            assert scaled.right["x"] is a.right["x"]
        assert jtu.tree_structure(scale.unscale(scaled)) == jtu.tree_structure(a)
        assert (scale.unscale(scaled).left == 1).all()


def test_float64_is_cast_too():
    with jax.enable_x64(True):
        wide = jnp.ones(2, jnp.float64)
        policy = compat.get_policy("p=f32,c=f16,o=bf16")
        assert policy.cast_to_param(wide).dtype == jnp.float32
        assert policy.cast_to_compute(wide).dtype == jnp.float16
        assert policy.cast_to_output(wide).dtype == jnp.bfloat16
        assert compat.cast_to_full(wide).dtype == jnp.float32
        assert compat.cast_to_half(wide).dtype == jnp.float16
        assert compat.get_policy("f64").cast_to_compute(jnp.ones(2, jnp.float32)).dtype == "float64"


def test_select_tree():
    a, b = {"step": 3, "lr": 0.5, "same": 7}, {"step": 2, "lr": 0.25, "same": 7}
    out = compat.select_tree(jnp.asarray(False), a, b)
    assert (out["step"], out["lr"], out["same"]) == (2, 0.25, 7)
    assert isinstance(out["same"], int)
    with pytest.raises(TypeError, match="'b' became 'a'"):
        compat.select_tree(jnp.asarray(True), "a", "b")
    with pytest.raises(ValueError, match="tree structure"):
        compat.select_tree(jnp.asarray(True), [1], [1, 2])
    with pytest.raises(TypeError, match="boolean scalar"):
        compat.select_tree(jnp.ones(2, bool), a, b)


# Loss scaling, as the documentation has it.


def half_loss(params: dict, x: Any) -> Any:
    params, x = compat.cast_to_half((params, x))
    return jnp.mean((x @ params["w"] - jnp.asarray(1, x.dtype)) ** 2)


def train_step(params: dict, loss_scale: Any, x: Any) -> tuple[dict, Any, Any]:
    grads = jax.grad(lambda params: loss_scale.scale(half_loss(params, x)))(params)
    grads = loss_scale.unscale(grads)
    updated = jtu.tree_map(lambda p, g: p - 0.1 * g, params, grads)
    if isinstance(loss_scale, compat.DynamicLossScale):
        grads_finite = compat.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        params = compat.select_tree(grads_finite, updated, params)
    else:
        params = updated
    return params, loss_scale, grads


SCALES: dict[str, Callable[[], Any]] = {
    "documented": lambda: compat.DynamicLossScale(compat.half_dtype()(2**15)),
    "dynamic": lambda: compat.DynamicLossScale(jnp.asarray(2.0**15), period=10),
    "static": lambda: compat.StaticLossScale(2**5),
    "none": lambda: compat.NoOpLossScale(),
}


@pytest.mark.rows(2)
@pytest.mark.parametrize("make", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit, lambda f: f], ids=["jit", "eqx", "eager"])
def test_documented_training_step(make: Callable, jit: Callable):
    params, scale = {"w": jnp.zeros((3, 1))}, make()
    x = jnp.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.5], [0.5, 0.0, 1.0]])
    before, step = half_loss(params, x), jit(train_step)
    for _ in range(20):
        params, scale, grads = step(params, scale, x)
        assert type(scale) is type(make())
        assert grads["w"].dtype == jnp.float32
    assert half_loss(params, x) < 0.25 * before
    assert isinstance(scale, compat.LossScale)


def test_documented_no_op():
    scale = compat.NoOpLossScale()
    tree = {"w": jnp.ones(2)}
    assert scale.scale(tree) is tree
    assert scale.unscale(tree) is tree
    assert scale.adjust(jnp.asarray(False)) is scale
    assert scale.loss_scale == 1


def test_documented_constructor():
    scale: Any = compat.DynamicLossScale(compat.half_dtype()(2**15))
    assert scale.loss_scale.dtype == jnp.float32
    assert scale.loss_scale == 2**15
    # jmp's adjust raises for it, and its scaled loss is a float16 infinity.
    assert scale.adjust(jnp.asarray(False)).loss_scale == 2**14
    assert scale.scale(jnp.float16(3.0)) == 3 * 2**15


def make_scale(**options: Any) -> Any:
    return compat.DynamicLossScale(
        loss_scale=jnp.asarray(2.0**12), counter=np.int32(5), period=7, factor=4, **options
    )


def fields(scale: Any) -> tuple:
    names = ("loss_scale", "counter", "period", "factor", "min_loss_scale")
    return tuple(float(getattr(scale, name)) for name in names)


COPIES: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda s: jtu.tree_unflatten(jtu.tree_structure(s), jtu.tree_leaves(s)),
    "map": lambda s: jtu.tree_map(lambda x: x, s),
    "jit": lambda s: jax.jit(lambda s: s)(s),
    "donated": lambda s: jax.jit(lambda s: s, donate_argnums=0)(jtu.tree_map(jnp.copy, s)),
    "lower": lambda s: jax.jit(lambda s: s).lower(s).compile()(s),
    "filter_jit": lambda s: eqx.filter_jit(lambda s: s)(s),
    "vmap": lambda s: jtu.tree_map(
        lambda x: x[0], jax.vmap(lambda s: s)(jtu.tree_map(lambda x: jnp.stack([x, x]), s))
    ),
    "scan": lambda s: jax.lax.scan(lambda s, _: (s, None), s, length=2)[0],
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "deserialize": lambda s: _through_file(s),
}


def _through_file(scale: Any) -> Any:
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, scale)
    buffer.seek(0)
    return eqx.tree_deserialise_leaves(buffer, jtu.tree_map(jnp.zeros_like, scale))


@pytest.mark.rows(4)
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_every_field_survives(copy: Callable):
    dynamic = make_scale(min_loss_scale=jnp.asarray(2.0**11))
    copied = copy(dynamic)
    assert fields(copied) == fields(dynamic) == (2**12, 5, 7, 4, 2**11)
    assert copied.adjust(jnp.asarray(False)).loss_scale == 2**11  # jmp, after jit: 2**10.
    assert type(copied) is compat.DynamicLossScale
    assert copy(compat.StaticLossScale(8.0)).loss_scale == 8


def test_a_scale_is_rounded_down_to_a_power_of_two():
    assert compat.StaticLossScale(1000).loss_scale == 512
    scale = compat.DynamicLossScale(65504.0, min_loss_scale=1e-3)
    assert (scale.loss_scale, scale.min_loss_scale) == (2**15, 2**-10)
    with pytest.raises(ValueError, match=r"`factor` must be a power of two.*got 3"):
        compat.DynamicLossScale(8.0, factor=3)
    with pytest.raises(TypeError, match=r"`loss_scale` must be known.*outside jit"):
        jax.jit(compat.StaticLossScale)(1.0)


def test_growth_ends_at_a_finite_scale():
    scale: Any = compat.DynamicLossScale(2.0**125, period=1)
    for _ in range(4):
        scale = scale.adjust(jnp.asarray(True))
    assert scale.loss_scale == 2.0**126
    assert scale.unscale(scale.scale(jnp.float32(1.5))) == 1.5


def test_adjusts_as_jmp_does(standard_promotion: None):
    jmp = pytest.importorskip("jmp")
    seed = random.randrange(2**31)
    options: Any = {"period": 3, "factor": 4, "min_loss_scale": np.float32(2.0)}
    theirs = jmp.DynamicLossScale(jnp.asarray(2.0**15), **options)
    ours = compat.DynamicLossScale(jnp.asarray(2.0**15), **options)
    for finite in random.Random(seed).choices((True, False), (3, 1), k=60):
        theirs, ours = (scale.adjust(jnp.asarray(finite)) for scale in (theirs, ours))
        assert fields(ours) == fields(theirs), seed


def test_scales_as_jmp_does(standard_promotion: None):
    jmp = pytest.importorskip("jmp")
    tree = [jnp.array([0.3, -1.7, 6e4]), jnp.array([0.3, 3e-5], jnp.float16)]
    for theirs, ours in (
        (jmp.DynamicLossScale(jnp.float32(2.0**15)), compat.DynamicLossScale(2.0**15)),
        (jmp.StaticLossScale(jnp.float32(2.0**15)), compat.StaticLossScale(2**15)),
    ):
        for method in ("scale", "unscale"):
            wanted, got = (getattr(scale, method)(tree) for scale in (theirs, ours))
            for a, b in zip(got, wanted, strict=True):
                assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())


def test_unscaled_gradients_are_float32_however_the_scale_was_written():
    # jnp.asarray(2.0**15), as jmp's documentation has it, is weakly typed: float16 stays float16
    # there, and a small gradient becomes zero when it is unscaled.
    small = jnp.float16(2.0**-12)
    for scale in (jnp.asarray(2.0**15), 2**15, np.float32(2**15), jnp.float16(2**15)):
        for kind in (compat.DynamicLossScale, compat.StaticLossScale):
            unscaled = kind(scale).unscale(small)
            assert unscaled.dtype == jnp.float32
            assert unscaled == 2.0**-27


def test_halfstep_takes_these_scales():
    params, x = {"w": jnp.ones(2)}, jnp.array([1.0, 2.0])
    for make in SCALES.values():
        scale, finite, grads = halfstep.filter_grad(
            lambda params, x: jnp.sum(params["w"] * x), make(), policy="f16", check_finite=True
        )(params, x / 2)
        assert type(scale) is type(make())
        assert finite
        assert (grads["w"] == x / 2).all()


def test_haiku_takes_these_policies(standard_promotion: None):
    hk = pytest.importorskip("haiku")
    policy = compat.get_policy("p=f32,c=f16,o=bf16")
    seen = []

    class Layer(hk.Module):
        def __call__(self, x: Any) -> Any:
            w = hk.get_parameter("w", (3,), init=jnp.ones)
            seen.append((x.dtype, w.dtype))
            return x * w

    hk.mixed_precision.set_policy(Layer, policy)
    try:
        model = hk.transform(lambda x: Layer()(x))
        params = model.init(jax.random.PRNGKey(0), jnp.ones(3))
        out = model.apply(params, None, jnp.ones(3))
    finally:
        hk.mixed_precision.clear_policy(Layer)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jtu.tree_leaves(params)} == {np.dtype(np.float32)}
    assert set(seen) == {(np.dtype(np.float16), np.dtype(np.float16))}
