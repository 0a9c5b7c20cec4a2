"""What JAX is to change: `jax_remat3`, and operations that halfstep does not know."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir

import halfstep
from tests.autocast._shared import stored_as
from tests.autocast.test_stores import DOTS, LAYERS, ROWS, loss_of, over_layers, saved, start
from tests.models import gpt

pytestmark = [pytest.mark.core]
# JAX 0.10 has the flag, but no policies of dots with it.
since_0_12 = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax_remat3 is unfinished")
POLICIES = {"none": None, **DOTS}
FORMS = ["bf16", "bf16,residuals=e4m3", "bf16,store:op:dot_general=e4m3", "f8"]


@contextlib.contextmanager
def flagged(on: bool) -> Iterator[None]:
    before = getattr(jax.config, "jax_remat3", False)
    jax.config.update("jax_remat3", on)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


def with_and_without(run: Any) -> tuple[Any, Any]:
    made = []
    for on in (False, True):
        with flagged(on):
            made.append(run())
    return made[0], made[1]


def no_remat(x: Any, params: Any) -> Any:
    return x + jax.nn.softmax(x @ params["up"]) @ params["down"], None


@since_0_12
@pytest.mark.rows(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("policy", ["no remat", *POLICIES])
def test_values_gradients_and_what_is_kept_are_the_same(policy: str, scan: bool, form: str):
    params, x = start()

    def run() -> Any:
        plain = policy == "no remat"
        loss = over_layers(no_remat, scan=scan) if plain else loss_of(POLICIES[policy], scan=scan)
        cast = halfstep.autocast(loss, form)
        kept = saved(cast, params, x)
        return jax.jit(jax.value_and_grad(cast))(params, x), sum(kept.values())

    today, coming = with_and_without(run)
    jax.tree.map(np.testing.assert_array_equal, today[0], coming[0])
    assert coming[1] == today[1] > 0


@since_0_12
@pytest.mark.parametrize("scan", [True, False])
def test_what_is_encoded_is_kept_as_bytes(scan: bool):
    params, x = start()

    def run() -> Any:
        loss = loss_of(DOTS["dots"], scan=scan)
        return saved(halfstep.autocast(loss, "bf16,residuals=e4m3"), params, x)

    today, coming = with_and_without(run)
    kept = LAYERS * ROWS * params["up"].shape[-1]
    assert coming["uint8"] == kept
    # What the loss reads is no result of a product, and stays in 16 bits.
    assert today["float8_e4m3fn"] == kept
    assert "float8_e4m3fn" not in coming


@since_0_12
@pytest.mark.parametrize("on", [False, True])
def test_a_second_derivative_of_a_code_is_refused(on: bool):
    params, x = start()
    loss = halfstep.autocast(loss_of(DOTS["dots"]), "bf16,residuals=e4m3")

    def slope(params: Any) -> Any:
        return sum(map(jnp.sum, jax.tree.leaves(jax.grad(loss)(params, x))))

    with flagged(on), pytest.raises(TypeError, match="no second derivative"):
        jax.grad(slope)(params)


@since_0_12
@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("scan", [True, False])
def test_a_small_gpt_trains_in_the_same_way(scan: bool):
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, 32)
    optimizer = optax.adamw(3e-3)

    def losses(cast: Any) -> Any:
        def run() -> list[float]:
            params = gpt.init(vocabulary=32, tokens=16, width=32, layers=2, key=jax.random.key(0))
            state = optimizer.init(params)

            @jax.jit
            def step(params: Any, state: Any) -> Any:
                loss = cast(lambda p, t: gpt.loss(p, t, heads=2, scan=scan))
                value, grads = jax.value_and_grad(loss)(params, tokens)
                updates, state = optimizer.update(grads, state, params)
                return optax.apply_updates(params, updates), state, value

            made = []
            for _ in range(50):
                params, state, value = step(params, state)
                made.append(float(value))
            return made

        return with_and_without(run)

    today, coming = losses(lambda f: halfstep.autocast(f, "bf16"))
    assert today[-1] < today[0] / 2
    assert today == coming


# Operations that halfstep does not know.

write = Primitive("tests_write")
"""Adds to a `Ref`, and does not say so."""
write.multiple_results = True
write.def_abstract_eval(lambda ref, value: [])


def _write(ref: Any, value: Any) -> list[Any]:
    ref[...] += value
    return []


write.def_impl(_write)

apply = Primitive("tests_apply")
"""Calls a function that it holds."""
apply.multiple_results = True


def _run(*values: Any, jaxpr: Any) -> list[Any]:
    return jaxpr_as_fun(jaxpr)(*values)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any) -> Any:
    tangents = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(jaxpr_as_fun(jaxpr), tuple(primals), tuple(tangents))


apply.def_impl(_run)
apply.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
ad.primitive_jvps[apply] = _jvp
mlir.register_lowering(apply, mlir.lower_fun(_run, multiple_results=True))
every_form = pytest.mark.parametrize("form", ["bf16", "f16", "bf16,residuals=e4m3"])


@every_form
@pytest.mark.parametrize("islands", [True, False])
def test_what_is_given_a_ref_keeps_its_place(form: str, islands: bool):
    def func(x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(3))
        write.bind(ref, jnp.exp(x))
        first = ref[...]
        write.bind(ref, 2 * x)
        ref[...] *= 3.0
        write.bind(ref, x)
        return first, ref[...]

    x = jnp.arange(3.0)
    made = halfstep.autocast(func, stored_as(form, islands))(x)
    jax.tree.map(np.testing.assert_array_equal, made, func(x))


@every_form
def test_what_holds_a_function_runs_it_as_written(form: str):
    held = jax.make_jaxpr(lambda x: [jnp.sin(x) * jnp.exp(x), jnp.sum(x)])(jnp.ones(3))

    def func(x: Any) -> Any:
        values, total = apply.bind(3 * x, jaxpr=held)
        return jnp.sum(values) * total

    x = jnp.arange(3.0)
    cast = halfstep.autocast(func, form)
    for change in (lambda f: f, jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))):
        np.testing.assert_allclose(change(cast)(x), change(func)(x), rtol=1e-6)


def test_a_held_function_with_an_effect_is_not_dropped(capfd: pytest.CaptureFixture[str]):
    def printing(x: Any) -> Any:
        jax.debug.print("seen {}", x)
        return [x]

    held = jax.make_jaxpr(printing)(jnp.float32(1))

    def func(x: Any) -> Any:
        apply.bind(x, jaxpr=held)
        return 2 * x

    assert halfstep.autocast(func, "bf16")(jnp.float32(7)) == 14
    jax.effects_barrier()
    assert "seen 7" in capfd.readouterr().out


def test_what_jax_cannot_differentiate_is_named():
    def func(x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(3))
        write.bind(ref, x)
        return jnp.sum(ref[...])

    with pytest.raises(NotImplementedError, match=r"`tests_write` runs as .*stop_gradient"):
        jax.grad(halfstep.autocast(func, "bf16"))(jnp.ones(3))
