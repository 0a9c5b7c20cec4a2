"""Gradient release: the same step, bit for bit, in less memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import halfstep
from halfstep import optim
from tests._rows import slow_unless
from tests.optim import _stack

pytestmark = pytest.mark.bits

OPTIMIZERS = {
    "adamw": lambda: optim.flash_adamw(1e-2),
    "adamw, schedule, 32 bits": lambda: optim.flash_adamw(
        optax.linear_schedule(1e-2, 1e-3, 3), master_bits=32
    ),
    "adamw, stochastic": lambda: optim.flash_adamw(1e-2, rounding="stochastic"),
    "lion": lambda: optim.flash_lion(1e-3),
    "sgd": lambda: optim.flash_sgd(0.1, 0.9, nesterov=True),
}


# LLVM's optimizations are a third of the compile time. Where bits of two programs are compared they
# stay: without them one may contract a product and a sum that the other does not.
fast = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def release(tx: Any, *, layer: Any = _stack.layer, **options: Any) -> optim.Release:
    return optim.release(layer, tx, first=_stack.first, last=_stack.last, **options)


def made(step: optim.Release, key: jax.Array, *, prepare: bool = True) -> tuple[Any, Any]:
    params = _stack.init(key)
    if prepare and hasattr(step.tx, "prepare"):
        return fast(step.prepare)(params)
    return params, fast(step.init)(params)


def assert_same(got: Any, expected: Any) -> None:
    """Same structure, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        assert a.dtype == b.dtype
        # Bits, so that zeros have their sign and what is not a number is compared too.
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)


def assert_follows(
    step: Any, plain: Any, args: tuple[Any, ...], *, batches: Any, same: Any = assert_same
) -> Any:
    """Several steps of both, which agree after each."""
    step, plain = jax.jit(step), jax.jit(plain)
    losses = []
    for ids in batches:
        params, state, *more = args
        got, expected = step(params, state, ids, *more), plain(params, state, ids, *more)
        if more:
            # Of the verdict, which says more, whether all is finite.
            got = (*got[:-1], got[-1].finite)
        same(got, expected)
        losses.append(float(got[0]))
        args = got[1:4]
    return args, losses


@pytest.mark.usefixtures("standard_promotion")
# SGD is the optimizer of most tests below.
@pytest.mark.parametrize("name", slow_unless(OPTIMIZERS, lambda name: name == "adamw, stochastic"))
def test_it_is_the_plain_step(name: str, getkey: Any):
    tx = OPTIMIZERS[name]()
    step = release(tx)
    params, state = made(step, getkey())
    ids = _stack.batch(getkey())
    _, losses = assert_follows(step, _stack.plain(tx), (params, state), batches=[ids] * 4)
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("standard_promotion")
def test_an_optimizer_of_optax(getkey: Any):
    tx = optax.adamw(1e-2)
    step = release(tx)
    params, state = made(step, getkey())

    def close(got: Any, expected: Any) -> None:
        # XLA fuses Optax's arithmetic as it likes, and sums the 32 tokens as it likes.
        eps = halfstep.FORMATS["f32"].eps
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            atol = 64 * eps * float(jnp.max(jnp.abs(b)))
            np.testing.assert_allclose(a, b, rtol=64 * eps, atol=atol)

    batches = [_stack.batch(getkey()) for _ in range(3)]
    assert_follows(step, _stack.plain(tx), (params, state), batches=batches, same=close)


@pytest.mark.slow
def test_clipping_that_is_not_reached_changes_nothing(getkey: Any):
    tx = optim.flash_sgd(0.1, 0.9)
    step = release(tx, clip=1e3)
    params, state = made(step, getkey())
    batches = [_stack.batch(getkey()) for _ in range(2)]
    assert_follows(step, _stack.plain(tx), (params, state), batches=batches)


@pytest.mark.parametrize(
    ("option", "limit", "scale"),
    [
        ("clip", 4.0, 2.0**10),
        ("per_layer_clip", 3.0, None),
        pytest.param("clip", 4.0, None, marks=pytest.mark.slow),
        pytest.param("per_layer_clip", 3.0, 2.0**10, marks=pytest.mark.slow),
    ],
)
def test_clipping_is_that_of_the_plain_step(option: str, limit: float, scale: Any, getkey: Any):
    options: dict[str, Any] = {option: limit}
    # All gradients are small integers: sums of squares are exact in any order.
    tx = optim.flash_sgd(0.5, 0.9, min_size=1)
    functions = {
        "first": lambda outer, batch: batch[0] * outer[None],
        "layer": lambda params, x, outer, batch: x + jnp.einsum("bw,wv->bv", x, params),
        "last": lambda outer, x, batch: jnp.sum(jnp.square(x - batch[1]).astype(jnp.float32)) / 2,
    }
    keys = [getkey() for _ in range(4)]
    params = {
        "outer": jnp.ones(64, jnp.bfloat16),
        "layers": jnp.zeros((3, 64, 64), jnp.bfloat16),
    }
    x = jax.nn.one_hot(jax.random.randint(keys[0], (4,), 0, 64), 64, dtype=jnp.bfloat16)
    batch = x, jax.random.randint(keys[1], (4, 64), -1, 2).astype(jnp.bfloat16)
    more = () if scale is None else (halfstep.StaticLossScaling(scale),)
    step = jax.jit(optim.release(tx=tx, **functions, **options))
    plain = jax.jit(_stack.plain(tx, **functions, **options))
    unclipped = fast(_stack.plain(tx, **functions))
    state = optim.release(tx=tx, **functions).init(params)
    for _ in range(3):
        got, expected = step(params, state, batch, *more), plain(params, state, batch, *more)
        assert_same(got[:3], expected[:3])
        # Parameters of integers again, with a state that has a past.
        before, state = state, got[2]
        free = unclipped(params, before, batch)[2]
        shorter, longer = (s.layers.first.scale.astype(jnp.float32) for s in (state, free))
        assert jnp.sum(shorter) < jnp.sum(longer)


def test_with_autocast(getkey: Any):
    tx = optim.flash_sgd(0.1, 0.9)
    layer = halfstep.autocast(_stack.layer, "bf16")
    step = release(tx, layer=layer)
    params, state = made(step, getkey(), prepare=False)
    assert params["layers"]["up"].dtype == jnp.float32
    batches = [_stack.batch(getkey()) for _ in range(3)]
    assert_follows(step, _stack.plain(tx, layer=layer), (params, state), batches=batches)


def test_with_loss_scaling(getkey: Any):
    tx = optim.flash_sgd(0.1, 0.9)
    step = release(tx)
    args = (*made(step, getkey()), halfstep.DynamicLossScaling(2.0**10, period=2))
    batches = [_stack.batch(getkey()) for _ in range(3)]
    (*_, scaling), _ = assert_follows(step, _stack.plain(tx), args, batches=batches)
    assert scaling.loss_scaling == 2.0**11


def test_a_step_that_overflows_is_skipped(getkey: Any):
    tx = optim.flash_adamw(1e-2)

    def last(outer: Any, x: Any, ids: Any) -> Any:
        # The way back multiplies a cotangent of 2**15 in float16, which it cannot hold.
        return jnp.sum(x.astype(jnp.float16).astype(jnp.float32)) + jnp.sum(outer["shift"])

    step = optim.release(_stack.layer, tx, first=_stack.first, last=last)
    params, state = made(step, getkey())
    ids = _stack.batch(getkey())
    scaling = halfstep.DynamicLossScaling(2.0**16)
    loss, new, new_state, scaling, finite = fast(step)(params, state, ids, scaling)
    assert jnp.isfinite(loss)
    assert not finite
    assert "scaled gradients" in finite.reason(params)
    assert finite.where(params) == "layers/bias"
    assert scaling.loss_scaling == 2.0**15
    assert_same((new, new_state), (params, state))
    *_, new_state, scaling, finite = fast(step)(params, state, ids, scaling)
    assert finite
    assert scaling.loss_scaling == 2.0**15
    assert (new_state.layers.count == 1).all()


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("make", [OPTIMIZERS["adamw"], lambda: optax.adamw(1e-2)])
def test_a_norm_that_is_not_finite_skips_the_step(make: Any, getkey: Any):
    step = release(make(), clip=1.0)
    params, state = made(step, getkey())
    params["layers"]["bias"] = params["layers"]["bias"].at[1, 3].set(jnp.nan)
    loss, new, new_state = fast(step)(params, state, _stack.batch(getkey()))
    assert jnp.isnan(loss)
    assert_same((new, new_state), (params, state))


def test_a_norm_that_overflows_is_told(getkey: Any):
    def last(outer: Any, x: Any, ids: Any) -> Any:
        # Gradients of 1e25 are finite, and the squares of which a norm is made are not.
        return 1e25 * _stack.last(outer, x, ids)

    step = optim.release(
        _stack.layer, optim.flash_adamw(1e-2), first=_stack.first, last=last, clip=1.0
    )
    params, state = made(step, getkey())
    scaling = halfstep.StaticLossScaling(1.0)
    _, new, new_state, _, finite = fast(step)(params, state, _stack.batch(getkey()), scaling)
    assert_same((new, new_state), (params, state))
    assert not finite
    assert finite.where(params) is None
    assert "the norm of all gradients is not" in finite.reason(params)


def test_small_leaves_are_those_of_one_layer(getkey: Any):
    step = release(optim.flash_adamw(1e-2))
    params, state = fast(step.prepare)(_stack.init(getkey(), layers=64))
    assert params["layers"]["bias"].size > 4096
    assert params["layers"]["bias"].dtype == jnp.float32
    assert state.layers.first["bias"].dtype == jnp.float32
    assert params["layers"]["up"].dtype == jnp.bfloat16
    assert state.layers.first["up"].codes.shape == (64, _stack.WIDTH, _stack.HIDDEN)
    assert state.layers.first["up"].scale.shape == (64, _stack.WIDTH // 32, _stack.HIDDEN)
    shapes = jax.eval_shape(step.init, params)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(lambda leaf: leaf.shape, shapes)


def test_what_is_not_trained_stays(getkey: Any):
    step = release(optim.flash_lion(1e-3))
    params, state = made(step, getkey())
    _, new, _ = fast(step)(params, state, _stack.batch(getkey()))
    assert new["outer"]["steps"] == 3
    assert (new["layers"]["number"] == params["layers"]["number"]).all()


def test_several_arrays_go_through_and_none_is_outside(getkey: Any):
    def layer(params: Any, x: Any, outer: Any, batch: Any) -> Any:
        del outer
        return {"a": x["b"] * batch, "b": x["a"] + params}

    step = optim.release(
        layer,
        optim.flash_sgd(0.5),
        first=lambda _, batch: {"a": batch, "b": 2 * batch},
        last=lambda _, x, __: jnp.sum(x["a"]) + jnp.sum(x["b"]),
    )
    params = {"outer": {}, "layers": jnp.zeros((2, 3))}
    state = step.init(params)
    loss, new, _ = step(params, state, jnp.full(3, 2.0))
    # a, b = 2, 4; then 8, 2 + p0; then 4 + 2 p0, 8 + p1.
    assert loss == 36
    np.testing.assert_array_equal(new["layers"], [[-1.0] * 3, [-0.5] * 3])


def test_over_four_devices(getkey: Any, mesh: jax.sharding.Mesh):
    tx = optim.flash_sgd(0.1, 0.9)
    step = release(tx)
    params, state = made(step, getkey())
    ids = _stack.batch(getkey())
    expected = fast(step)(params, state, ids)

    def put(tree: Any, spec: P) -> Any:
        def of(leaf: Any) -> Any:
            # Columns: rows of 96 are not divided into whole groups of 32.
            fits = leaf.ndim == len(spec)
            return jax.device_put(leaf, NamedSharding(mesh, spec if fits else P()))

        return jax.tree.map(of, tree)

    params = {
        "outer": put(params["outer"], P(None, "data")),
        "layers": put(params["layers"], P(None, None, "data")),
    }
    shapes = jax.eval_shape(step.init, params)
    shardings = optim.ReleaseState(
        *(optim.state_shardings(getattr(shapes, name), params[name]) for name in shapes._fields)
    )
    state = jax.device_put(state, shardings)
    got = fast(step, out_shardings=(None, None, shardings))(params, state, ids)
    assert got[1]["layers"]["up"].sharding.spec == P(None, None, "data")
    assert got[2].layers.first["up"].scale.sharding.spec == P(None, None, "data")
    # Sums over devices are in another order: a last bit of bfloat16, of gradients below 1.
    eps = halfstep.FORMATS["bf16"].eps
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(expected[1]), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2 * eps, atol=0.1 * eps)


def test_donated_arguments_are_reused(getkey: Any):
    step = release(optim.flash_adamw(1e-2))
    params, state = made(step, getkey())
    compiled = fast(step, donate_argnums=(0, 1)).lower(params, state, _stack.batch(getkey()))
    memory: Any = compiled.compile().memory_analysis()
    given = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    assert memory.alias_size_in_bytes == given


def test_parameters_outside_that_layers_do_not_use_are_not_carried(getkey: Any):
    step = release(optim.flash_adamw(1e-2))
    params, state = made(step, getkey())
    jaxpr: Any = jax.make_jaxpr(step)(params, state, _stack.batch(getkey())).jaxpr
    # The loop that steps is the one that carries codes; the first one keeps what enters layers.
    carried = [
        {(var.aval.shape, var.aval.dtype) for var in equation.outvars}
        for equation in jaxpr.eqns
        if equation.primitive.name in ("while", "scan")
    ]
    stepping = [shapes for shapes in carried if any(dtype == jnp.int8 for _, dtype in shapes)]
    assert len(stepping) == 1
    assert ((_stack.HIDDEN,), jnp.dtype(jnp.float32)) in stepping[0]
    assert not any(shape == (_stack.WORDS, _stack.WIDTH) for shape, _ in stepping[0])


def broken(**changes: Any) -> Any:
    """A step with one part changed, and its arguments."""
    parts = {"layer": _stack.layer, "first": _stack.first, "last": _stack.last, **changes}
    tx = parts.pop("tx", optim.flash_adamw(1e-2))
    step = optim.release(parts.pop("layer"), tx, **parts)
    params = _stack.init(jax.random.key(0))
    return step, params, fast(step.init)(params), _stack.batch(jax.random.key(1))


def test_errors_of_parameters():
    step, params, state, ids = broken()
    with pytest.raises(TypeError, match=r"got \['layers'\].*pass \{'outer': \{\}"):
        step({"layers": params["layers"]}, state, ids)
    with pytest.raises(TypeError, match=r"`params` must be a dict.*got list"):
        step.init([params])
    uneven = {**params["layers"], "bias": jnp.zeros((4, 8))}
    with pytest.raises(
        ValueError, match=r"same number of layers.*layers/bias \[4, 8\], layers/down \[3,"
    ):
        step.init({**params, "layers": uneven})
    with pytest.raises(ValueError, match=r"layers/b: .* without axes.*put it in 'outer'"):
        step.init({"outer": {}, "layers": {"a": jnp.zeros((2, 3)), "b": jnp.zeros(())}})
    with pytest.raises(ValueError, match="got no arrays"):
        step.init({"outer": {}, "layers": {}})
    with pytest.raises(ValueError, match="floating-point arrays to train; got only int32"):
        step.init({"outer": {}, "layers": jnp.arange(3)})


def test_errors_of_states():
    step, params, state, ids = broken()
    tx = step.tx
    with pytest.raises(optim.StateError, match=r"must be a ReleaseState.*got FlashState"):
        step(params, fast(tx.init)(params["layers"]), ids)
    own = optim.ReleaseState(state.outer, fast(tx.init)(params["layers"]))
    with pytest.raises(optim.StateError, match=r"3 layers on its first axis.*count: int32\[\]"):
        step(params, own, ids)
    other = fast(release(optim.flash_lion(1e-3)).init)(params)
    with pytest.raises(optim.StateError, match="made by another optimizer"):
        step(params, other, ids)
    with pytest.raises(TypeError, match=r"only compressed optimizers.*call `init`"):
        release(optax.sgd(0.1)).prepare(params)


def test_an_optimizer_that_changes_dtypes_is_refused():
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return updates, state.astype(jnp.bfloat16)

    tx = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.float32), update)
    step, *args = broken(tx=tx)
    with pytest.raises(
        optim.StateError, match=r"must keep the structure, .*float32\[\] became bfloat16\[\]"
    ):
        step(*args)


def test_errors_of_functions():
    step, *args = broken(layer=lambda p, x, outer, ids: x.astype(jnp.bfloat16))
    with pytest.raises(
        TypeError, match=r"a layer must return what it gets.*became bfloat16\[4, 8,"
    ):
        step(*args)
    step, *args = broken(layer=lambda p, x, outer, ids: x[:, :4])
    with pytest.raises(TypeError, match=r"float32\[4, 8, 64\] became float32\[4, 4, 64\]"):
        step(*args)
    step, *args = broken(layer=lambda p, x, outer, ids: (x, x))
    with pytest.raises(TypeError, match=r"a layer must return what it gets.*PyTreeDef"):
        step(*args)
    step, *args = broken(first=lambda outer, ids: {"x": outer["embed"][ids], "mask": ids > 0})
    with pytest.raises(TypeError, match=r"got bool\[4, 9\] at `mask`.*get the batch"):
        step(*args)
    step, *args = broken(first=lambda outer, ids: {})
    with pytest.raises(TypeError, match="`first` must return the arrays"):
        step(*args)
    step, *args = broken(last=lambda outer, x, ids: jnp.sum(x, axis=-1))
    with pytest.raises(TypeError, match=r"`last` must return the loss.*float32\[4, 8\].*jnp.mean"):
        step(*args)
    with pytest.raises(TypeError, match=r"`scaling` must be a DynamicLossScaling.*got float"):
        broken()[0](*args, 2.0**15)


def test_errors_of_options():
    with pytest.raises(TypeError, match=r"`first` must be a function, first\(outer, batch\)"):
        broken(first=None)
    with pytest.raises(TypeError, match=r"`tx` must be an optimizer.*got float"):
        broken(tx=1e-3)
    with pytest.raises(ValueError, match="`clip` or `per_layer_clip`, not both"):
        broken(clip=1.0, per_layer_clip=1.0)
    with pytest.raises(ValueError, match=r"`clip` must be a positive number.*got 0"):
        broken(clip=0)
    with pytest.raises(ValueError, match=r"`per_layer_clip` must be a positive number.*got -1"):
        broken(per_layer_clip=-1)
