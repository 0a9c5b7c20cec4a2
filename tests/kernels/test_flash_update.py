"""The kernels, interpreted, and the reference: each against float64, and against one another."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from halfstep.kernels.flash_update import Leaf, Spec, _block, _gpu, _tpu, _xla_gpu, flash_update
from halfstep.quant import Groups
from tests._rows import slow_unless
from tests.kernels._oracle import check, make, scalars

ALGORITHMS = ("adam", "lion", "sgd", "nesterov", "sgd without momentum")
LOWS = {
    "24 bits": (jnp.bfloat16, jnp.int8),
    "32 bits": (jnp.bfloat16, jnp.int16),
    "bfloat16": (jnp.bfloat16, None),
    "float32": (jnp.float32, None),
}
GRADS = (jnp.bfloat16, jnp.float32, jnp.float16)
SHAPES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((64, 256), -2),
    ((50, 33), -2),
    ((3, 64, 40), -2),
    ((3, 40, 50), -2),
    ((37, 96), -1),
    ((37, 50), -1),
    ((5000,), -1),
    ((4, 64, 3, 5), -3),
    ((3, 32, 2, 192), -3),
)
KINDS = ("reference", "two passes", "gpu", "tpu")


# LLVM's optimizations are most of the compile time and change nothing here.
fast = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def run(kind: str, leaf: Leaf, grad: Any, by: Any, spec: Spec) -> Leaf:
    if kind in ("reference", "two passes"):
        plain = {"reference": _block, "two passes": _xla_gpu}[kind]
        return fast(functools.partial(plain.update, spec=spec))(leaf, grad, by)
    module = {"gpu": _gpu, "tpu": _tpu}[kind]
    update = functools.partial(module.update, spec=spec, interpret=True)
    return fast(update)(leaf, grad, jnp.stack(by))


def spec_of(algorithm: str, groups: Groups, *, stochastic: bool = False, bits: int = 8) -> Spec:
    rule: Any = "sgd" if algorithm in ("nesterov", "sgd without momentum") else algorithm
    return Spec(
        rule,
        groups,
        nesterov=algorithm == "nesterov",
        first_code=f"int{bits}",
        second_code=f"root{bits}",
        stochastic=stochastic,
    )


def assert_same(left: Leaf, right: Leaf) -> None:
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            # By bits: zeros have signs.
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# All forms share their arithmetic: each once, and all pairs on one of them, which are slow.
PAIRS = [
    (kind, algorithm, low)
    for kind in KINDS
    for algorithm in ALGORITHMS
    for low in LOWS
    if kind == "gpu" or algorithm == "adam" or low == "24 bits"
]


@pytest.mark.rows(7)
@pytest.mark.parametrize(
    ("kind", "algorithm", "low"),
    slow_unless(PAIRS, lambda _, algorithm, low: algorithm == "adam" or low == "24 bits"),
)
def test_it_is_the_step_of_float64(kind: str, algorithm: str, low: str) -> None:
    param, bits = LOWS[low]
    grad_dtype = GRADS[ALGORITHMS.index(algorithm) % (2 if kind == "tpu" else 3)]
    leaf, grad, groups = make(
        (64, 128), algorithm=algorithm, param=param, low=bits, grad=grad_dtype
    )
    spec = spec_of(algorithm, groups)
    check(leaf, run(kind, leaf, grad, scalars(), spec), grad, scalars(), spec)


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("kind", "shape", "axis"),
    slow_unless(
        [(kind, *at) for kind in KINDS for at in SHAPES],
        # The reference takes any groups in the same way.
        lambda kind, shape, axis: kind in ("gpu", "two passes") or axis == -2,
    ),
    ids=str,
)
def test_every_shape(kind: str, shape: tuple[int, ...], axis: int) -> None:
    leaf, grad, groups = make(shape, axis=axis, scale=jnp.float32 if axis == -1 else jnp.bfloat16)
    spec = spec_of("adam", groups, stochastic=kind != "gpu")
    if kind in ("gpu", "tpu") and {"gpu": _gpu, "tpu": _tpu}[kind].refusal(leaf, grad, spec):
        pytest.skip("XLA updates it there")
    check(leaf, run(kind, leaf, grad, scalars(), spec), grad, scalars(), spec)


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("kind", "shape", "axis"),
    slow_unless(
        [(kind, *at) for kind in KINDS for at in SHAPES],
        lambda kind, shape, axis: (
            kind == "gpu" or shape == (50, 33) or (kind == "two passes" and axis == -1)
        ),
    ),
    ids=str,
)
def test_two_codes_in_a_byte(kind: str, shape: tuple[int, ...], axis: int) -> None:
    leaf, grad, groups = make(shape, axis=axis, bits=4)
    spec = spec_of("adam", groups, bits=4)
    if kind in ("gpu", "tpu") and {"gpu": _gpu, "tpu": _tpu}[kind].refusal(leaf, grad, spec):
        pytest.skip("XLA updates it there")
    check(leaf, run(kind, leaf, grad, scalars(), spec), grad, scalars(), spec)


@pytest.mark.rows(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ["lion", "nesterov", "sgd without momentum"])
def test_one_moment_or_none_of_4_bits(kind: str, algorithm: str) -> None:
    leaf, grad, groups = make((64, 128), algorithm=algorithm, bits=4)
    spec = spec_of(algorithm, groups, bits=4)
    check(leaf, run(kind, leaf, grad, scalars(), spec), grad, scalars(), spec)


@pytest.mark.slow
def test_all_forms_draw_the_same_codes() -> None:
    leaf, grad, groups = make((64, 128), bits=4)
    made = [run(kind, leaf, grad, scalars(), spec_of("adam", groups, bits=4)) for kind in KINDS]
    for other in made[1:]:
        # Rounding of float32 moves few values over the edge of a code.
        assert (other.first == made[0].first).mean() > 0.99
        assert (other.second == made[0].second).mean() > 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes_where_it_is_not_to_be_kept(kind: str) -> None:
    leaf, grad, groups = make((64, 128) if kind == "gpu" else (50, 33), axis=-2)
    new = run(kind, leaf, grad * jnp.bfloat16(jnp.nan), scalars(keep=0), spec_of("adam", groups))
    assert_same(new, leaf)


@pytest.mark.rows(2)
@pytest.mark.parametrize("kind", ["two passes", "gpu", "tpu"])
def test_an_element_that_is_not_finite_is_left_out(kind: str) -> None:
    leaf, grad, groups = make((64, 128))
    spec = spec_of("adam", groups)
    hole = run(kind, leaf, grad.at[5, 7].set(jnp.nan), scalars(), spec)
    none = run(kind, leaf, grad.at[5, 7].set(0), scalars(), spec)
    assert hole.param[5, 7] == leaf.param[5, 7]
    assert_same(*(new._replace(param=None, low=None) for new in (hole, none)))


def test_no_kernel_has_an_error_that_says_what_to_type() -> None:
    leaf, grad, groups = make((5000,))
    spec, by = spec_of("adam", groups), scalars()
    with pytest.raises(
        ValueError, match=r"the kernel of implementation='tpu' takes groups.*got Groups"
    ):
        flash_update(leaf, grad, by, spec, implementation="tpu")
    with pytest.raises(
        ValueError,
        match=r"='gpu' takes full groups of 32 rows.*got Groups.*, which takes XLA for such a leaf",
    ):
        flash_update(leaf, grad, by, spec, implementation="gpu")
    random = spec_of("adam", groups, stochastic=True)
    with pytest.raises(
        ValueError, match="='gpu' rounds codes of 8 bits and parameters to the nearest"
    ):
        flash_update(leaf, grad, by, random, implementation="gpu")
    leaf, grad, groups = make((64, 128))
    spec = spec_of("adam", groups)
    with pytest.raises(ValueError, match="is compiled for cpu here"):
        flash_update(leaf, grad, by, spec, implementation="gpu")


@pytest.mark.parametrize("implementation", [None, "xla", "interpret"])
def test_batches_and_eager_calls(implementation: Any) -> None:
    leaf, grad, groups = make((64, 128))
    spec, by = spec_of("adam", groups), scalars()
    one = functools.partial(flash_update, by=by, spec=spec, implementation=implementation)
    check(leaf, one(leaf, grad), grad, by, spec)
    both = jax.tree.map(lambda x: jnp.stack([x, x]), leaf)
    made = jax.vmap(one, in_axes=(0, None))(both, grad)
    check(leaf, jax.tree.map(lambda x: x[1], made), grad, by, spec)


def test_a_batch_of_hyperparameters_has_no_kernel() -> None:
    leaf, grad, groups = make((64, 128))
    spec = spec_of("adam", groups)
    by = jax.tree.map(lambda x: jnp.stack([x, x]), scalars())
    for implementation in (None, "xla"):
        one = functools.partial(flash_update, leaf, grad, spec=spec, implementation=implementation)
        made = jax.vmap(lambda by, one=one: one(by=by))(by)
        check(leaf, jax.tree.map(lambda x: x[1], made), grad, scalars(), spec)
    named = functools.partial(flash_update, leaf, grad, spec=spec, implementation="interpret")
    with pytest.raises(
        ValueError,
        match=r"='interpret' takes one set of hyperparameters.*`jax.vmap` gave it 2.*=None",
    ):
        jax.vmap(lambda by: named(by=by))(by)


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("implementation", "axes", "spec"),
    slow_unless(
        [
            (implementation, axes, spec)
            for implementation in (None, "xla", "interpret")
            for axes in ("auto", "explicit", "shard_map", "told")
            for spec in (P("data"), P(None, "data"))
        ],
        # On every change each kind of mesh, and both axes of a matrix where XLA divides it.
        lambda implementation, axes, spec: (
            implementation != "xla" and (axes == "auto" or spec == P("data"))
        ),
    ),
    ids=str,
)
def test_devices_need_nothing_of_one_another(implementation: Any, axes: str, spec: P) -> None:
    kind = AxisType.Explicit if axes == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    # A quarter of its rows, and of its columns, is what the kernel of a GPU takes.
    leaf, grad, groups = make((128, 512))
    by, which = scalars(), spec_of("adam", groups)
    sharding = NamedSharding(mesh, spec)
    leaf, grad = jax.device_put((leaf, grad), sharding)
    step: Any = functools.partial(
        flash_update,
        spec=which,
        implementation=implementation,
        sharding=sharding if axes == "told" else None,
    )
    if axes == "shard_map":
        # Pallas cannot interpret what is checked; compiled, it is.
        step = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(spec, spec, P()),
            out_specs=spec,
            check_vma=implementation != "interpret",
        )
    compiled = fast(step).lower(leaf, grad, by).compile()
    text = compiled.as_text()
    assert text is not None
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)
    new = compiled(leaf, grad, by)
    assert new.param.sharding.is_equivalent_to(sharding, 2)
    assert new.second_scale.sharding.is_equivalent_to(sharding, 2)
    old, made, given = jax.tree.map(jnp.asarray, jax.device_get((leaf, new, grad)))
    check(old, made, given, by, which)


def test_it_has_derivatives_where_the_reference_has() -> None:
    name = "sgd without momentum"
    leaf, grad, groups = make((64, 48), algorithm=name, param=jnp.float32, low=None)
    spec = spec_of(name, groups)

    def loss(rate: Any, implementation: Any) -> Any:
        by = scalars()._replace(rate=rate)
        return flash_update(leaf, grad, by, spec, implementation=implementation).param.sum()

    made = [jax.grad(loss)(jnp.float32(0.1), name) for name in (None, "xla")]
    assert made[0] == made[1] != 0
