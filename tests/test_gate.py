"""Commit or keep: the three forms of the gate do the same."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import Ledger, Verdict

pytestmark = [pytest.mark.core, pytest.mark.types]

GATES = ("loop", "cond", "select")
gates = pytest.mark.parametrize("gate", GATES)


def run(gate, finite, state, commit):
    return halfstep.transaction(finite, commit, state, Ledger(), gate=gate)


@gates
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("under_jit", [True, False])
def test_all_or_nothing(gate, finite: bool, under_jit: bool):
    state = {
        "params": (jnp.arange(3.0), jnp.ones((2, 2), jnp.bfloat16)),
        "ema": jnp.zeros(3),
        "step": jnp.asarray(7),
        "key": jax.random.key(3),
        "activation": jax.nn.relu,
        "nothing": None,
    }

    def commit(s):
        return {
            **s,
            "params": (s["params"][0] * 2, s["params"][1] + 1),
            "ema": s["ema"] + s["params"][0],
            "step": s["step"] + 1,
            "key": jax.random.split(s["key"])[0],
        }

    step = lambda finite, state: run(gate, finite, state, commit)  # noqa: E731
    step = eqx.filter_jit(step) if under_jit else step
    out, ledger = step(jnp.asarray(finite), state)
    expected = commit(state) if finite else state
    unkeyed = lambda tree: eqx.filter({**tree, "key": jax.random.key_data(tree["key"])}, eqx.is_array)  # noqa: E731, E501  # fmt: skip
    same = jax.tree.map(lambda a, b: (a == b).all() & (a.dtype == b.dtype), unkeyed(out), unkeyed(expected))  # noqa: E501  # fmt: skip
    assert all(jax.tree.leaves(same))
    assert out["activation"] is jax.nn.relu
    assert (int(ledger.applied), int(ledger.skipped)) == (finite, not finite)


@gates
def test_vmap_decides_for_each(gate):
    flags, states = jnp.asarray([True, False, True]), jnp.arange(3.0)
    out, ledger = jax.vmap(lambda f, s: run(gate, f, s, lambda s: s + 10))(flags, states)
    assert np.array_equal(out, [10, 1, 12])
    assert np.array_equal(ledger.skipped, [0, 1, 0])


@gates
def test_scan_and_donation(gate):
    def turn(state, finite):
        return run(gate, finite, state, lambda s: (s[0] + 1, s[1] * 2))[0], None

    flags = jnp.asarray([True, False, True, True])
    step = jax.jit(lambda state: jax.lax.scan(turn, state, flags)[0], donate_argnums=0)
    out = step((jnp.zeros(3), jnp.ones(2)))
    assert np.array_equal(out[0], [3, 3, 3])
    assert np.array_equal(out[1], [8, 8])


@pytest.mark.parametrize("gate", ["cond", "select"])
def test_reverse_mode_through_the_differentiable_forms(gate):
    """Hypergradients: the loss after a step, by the learning rate."""

    def after(rate, finite):
        return run(gate, finite, jnp.asarray(1.0), lambda w: w - rate * 3.0)[0]

    grad = jax.jit(jax.grad(after))
    assert grad(0.5, jnp.asarray(True)) == -3
    assert grad(0.5, jnp.asarray(False)) == 0


def test_forward_mode_through_the_loop():
    def after(rate):
        return run("loop", jnp.asarray(True), jnp.asarray(1.0), lambda w: w - rate * 3.0)[0]

    assert jax.jit(lambda r: jax.jvp(after, (r,), (1.0,))[1])(0.5) == -3


@gates
def test_a_skipped_commit_is_not_run(gate):
    """Outside of a trace the commit is not even called; in a loop or cond it is not executed."""
    calls = []
    run(gate, jnp.asarray(False), jnp.zeros(2), lambda s: calls.append(s) or s)
    assert calls == []


@gates
def test_unchecked_compiles_no_gate(gate):
    verdict = Verdict(None, None, None)
    jaxpr: Any = jax.make_jaxpr(lambda s: run(gate, verdict, s, lambda s: s + 1)[0])(jnp.zeros(2))
    assert [str(eqn.primitive) for eqn in jaxpr.eqns if eqn.outvars[0].aval.shape] == ["add"]


@gates
@pytest.mark.parametrize(
    ("commit", "error", "message"),
    [
        (lambda s: {**s, "w": s["w"].astype("bfloat16")}, TypeError,
         r"at `w` float32\[2\] became bfloat16\[2\].*cast_to_float32"),
        (lambda s: {**s, "w": jnp.ones(3)}, TypeError, r"at `w` float32\[2\] became float32\[3\]"),
        (lambda s: {"w": s["w"]}, ValueError, "keep its tree structure"),
        (lambda s: {**s, "name": "other"}, TypeError, r"at `name` 'sgd' became 'other'"),
    ],
)  # fmt: skip
def test_a_commit_that_changes_types_is_refused(gate, commit, error, message):
    state = {"w": jnp.ones(2), "name": "sgd"}
    with pytest.raises(error, match=message):
        eqx.filter_jit(lambda f: run(gate, f, state, commit))(jnp.asarray(True))


def test_weak_types_are_no_difference():
    out, _ = jax.jit(lambda f: run("loop", f, jnp.asarray(1.0), lambda s: jnp.float32(2.0)))(True)
    assert out == 2


class TestSelectTree:
    def test_selects(self):
        new = {"w": jnp.ones(2), "f": jax.nn.relu, "k": jax.random.key(1), "n": np.ones(2)}
        old = {"w": jnp.zeros(2), "f": jax.nn.relu, "k": jax.random.key(0), "n": np.zeros(2)}
        for flag in (True, jnp.asarray(True), np.bool_(True)):
            assert halfstep.select_tree(flag, new, old)["w"][0] == 1
        out = halfstep.select_tree(jnp.asarray(False), new, old)
        assert out["w"][0] == 0
        assert out["n"][0] == 0
        assert (jax.random.key_data(out["k"]) == jax.random.key_data(old["k"])).all()

    def test_unchecked_takes_the_new(self):
        new = {"w": jnp.ones(2)}
        assert halfstep.select_tree(Verdict(None, None, None), new, {"w": jnp.zeros(2)}) is new

    def test_errors(self):
        with pytest.raises(TypeError, match=r"required a boolean scalar.*shape \(2,\)"):
            halfstep.select_tree(jnp.array([True, False]), 1, 1)
        with pytest.raises(TypeError, match=r"at `w` float32\[2\] became float16\[2\]"):
            halfstep.select_tree(
                jnp.asarray(True), {"w": jnp.ones(2, "float16")}, {"w": jnp.ones(2)}
            )
        with pytest.raises(ValueError, match="`on_true` to have the tree structure of `on_false`"):
            halfstep.select_tree(jnp.asarray(True), {"w": 1}, {"v": 1})
