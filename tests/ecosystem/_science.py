"""Solvers, physics and state spaces."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from tests.ecosystem._programs import Made, Numbers, Registry, cross_entropy, scalar

SCIENCE = Registry()


def _neural_ode(adjoint: str) -> Made:
    dx = import_module("diffrax")
    numbers = Numbers()
    network = eqx.nn.MLP(4, 4, 16, 2, activation=jnp.tanh, key=jax.random.key(0))

    def loss(network: Any, starts: jax.Array, times: jax.Array) -> jax.Array:
        def solve(start: jax.Array) -> Any:
            return dx.diffeqsolve(
                dx.ODETerm(lambda t, y, args: args(y)),
                dx.Tsit5(),
                0.0,
                1.0,
                0.1,
                start,
                args=network,
                saveat=dx.SaveAt(ts=times),
                stepsize_controller=dx.PIDController(rtol=1e-3, atol=1e-5),
                adjoint=getattr(dx, adjoint)(),
                max_steps=32,
            ).ys

        return jnp.mean(jax.vmap(solve)(starts) ** 2)

    return loss, network, (numbers.normal(4, 4), np.linspace(0, 1, 5, dtype=np.float32))


@SCIENCE.add("diffrax")
def diffrax_recursive_checkpoint() -> Made:
    return _neural_ode("RecursiveCheckpointAdjoint")


@SCIENCE.add("diffrax")
def diffrax_backsolve() -> Made:
    return _neural_ode("BacksolveAdjoint")


@SCIENCE.add("diffrax")
def diffrax_direct() -> Made:
    return _neural_ode("DirectAdjoint")


def _implicit(solve: Callable[[Any, jax.Array], Any]) -> Made:
    """A loss of what a solver finds, given the parameters and the data."""
    numbers = Numbers()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum((params["out"] @ solve(params, x).value) ** 2)

    params = {"w": numbers.normal(16, 16, scale=0.1), "out": numbers.normal(8, 16)}
    return loss, params, (numbers.normal(16),)


_RAISES: dict[str, Any] = {
    "without": ("f16",),
    "note": "needs the environment variable `EQX_ON_ERROR=nan` in float16. Otherwise the linear "
    "solver of the backward pass raises where a loss scale is too high, before the step can be "
    "skipped ([lineax #117](https://github.com/patrick-kidger/lineax/issues/117))",
}


@SCIENCE.add("optimistix", **_RAISES)
def optimistix_newton() -> Made:
    ox = import_module("optimistix")

    def solve(params: Any, x: jax.Array) -> Any:
        def residual(y: jax.Array, args: Any) -> jax.Array:
            return y - jnp.tanh(args["w"] @ y + x)

        options = {"args": params, "max_steps": 32, "throw": False}
        return ox.root_find(residual, ox.Newton(1e-5, 1e-5), jnp.zeros(16), **options)

    return _implicit(solve)


@SCIENCE.add("optimistix", **_RAISES)
def optimistix_fixed_point() -> Made:
    ox = import_module("optimistix")

    def solve(params: Any, x: jax.Array) -> Any:
        def after(y: jax.Array, args: Any) -> jax.Array:
            return jnp.tanh(args["w"] @ y + x)

        options = {"args": params, "max_steps": 64, "throw": False}
        return ox.fixed_point(after, ox.FixedPointIteration(1e-5, 1e-5), jnp.zeros(16), **options)

    return _implicit(solve)


@SCIENCE.add("lineax")
def lineax_cholesky_and_cg() -> Made:
    lx, numbers = import_module("lineax"), Numbers()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        matrix = params["w"] @ params["w"].T + jnp.eye(16)
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        first = lx.linear_solve(operator, jnp.tanh(x @ params["in"]), throw=False).value
        second = lx.linear_solve(operator, first, lx.CG(1e-5, 1e-5), throw=False).value
        return jnp.sum(second**2)

    params = {"w": numbers.normal(16, 16, scale=0.3), "in": numbers.normal(8, 16)}
    return loss, params, (numbers.normal(8),)


@SCIENCE.add(
    "jaxopt",
    note="passes its data to the solver as arguments. A solver that closes over arguments of the "
    "loss raises `UnexpectedTracerError`, also under `jax.grad(jax.jit(loss))` "
    "([JAX #34216](https://github.com/jax-ml/jax/pull/34216))",
)
def jaxopt_implicit_gradient_descent() -> Made:
    jaxopt, numbers = import_module("jaxopt"), Numbers()

    def loss(params: Any, x: Any, y: Any, x_valid: Any, y_valid: Any) -> jax.Array:
        # Implicit derivatives are by arguments only: what is closed over would leak, as it does
        # from `jax.grad` of a jitted loss.
        def inner(weights: Any, penalty: Any, features: Any, x: Any, y: Any) -> jax.Array:
            error = jnp.tanh(x @ features) @ weights - y
            return jnp.mean(error**2) + jnp.exp(penalty) * jnp.sum(weights**2)

        solver = jaxopt.GradientDescent(inner, maxiter=15, stepsize=0.1, implicit_diff=True)
        weights = solver.run(jnp.zeros(8), params["penalty"], params["features"], x, y).params
        return jnp.mean((jnp.tanh(x_valid @ params["features"]) @ weights - y_valid) ** 2)

    params = {"features": numbers.normal(4, 8, scale=0.4), "penalty": scalar(-2)}
    data = numbers.normal(16, 4), numbers.normal(16), numbers.normal(16, 4), numbers.normal(16)
    return loss, params, data


@SCIENCE.add("jax")
def gaussian_process_by_cholesky() -> Made:
    numbers = Numbers()

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["w"])
        distance = jnp.sum((hidden[:, None] - hidden[None]) ** 2, -1)
        kernel = jnp.exp(-distance / 2 / jnp.exp(params["length"]))
        kernel += jnp.exp(params["noise"]) * jnp.eye(len(x))
        factor = jax.scipy.linalg.cho_factor(kernel, lower=True)
        solved = jax.scipy.linalg.cho_solve(factor, y)
        return 0.5 * y @ solved + jnp.sum(jnp.log(jnp.diag(factor[0])))

    params = {
        "w": numbers.normal(8, 4, scale=0.3),
        "length": scalar(0),
        "noise": scalar(-3),
    }
    return loss, params, (numbers.normal(24, 8), numbers.normal(24))


def _field(params: Any, point: jax.Array) -> jax.Array:
    for weights, bias in params[:-1]:
        point = jnp.tanh(weights @ point + bias)
    return (params[-1][0] @ point + params[-1][1])[0]


def _field_params(numbers: Numbers) -> Any:
    shapes = (((32, 2), 0.5), ((32, 32), 0.2), ((1, 32), 0.2))
    return [
        (numbers.normal(*shape, scale=scale), numbers.normal(shape[0], scale=0.1))
        for shape, scale in shapes
    ]


@SCIENCE.add("jax")
def physics_informed_by_hessian() -> Made:
    numbers = Numbers()

    def loss(params: Any, points: jax.Array) -> jax.Array:
        def residual(point: jax.Array) -> jax.Array:
            second = jax.hessian(lambda at: _field(params, at))(point)
            return jnp.trace(second) + jnp.sin(point[0])

        return jnp.mean(jax.vmap(residual)(points) ** 2)

    return loss, _field_params(numbers), (numbers.normal(32, 2),)


@SCIENCE.add("jax")
def physics_informed_by_forward_mode() -> Made:
    numbers = Numbers()

    def loss(params: Any, points: jax.Array) -> jax.Array:
        def second(point: jax.Array, along: jax.Array) -> jax.Array:
            def first(at: jax.Array) -> jax.Array:
                return jax.jvp(lambda to: _field(params, to), (at,), (along,))[1]

            return jax.jvp(first, (point,), (along,))[1]

        def residual(point: jax.Array) -> jax.Array:
            return sum(second(point, row) for row in jnp.eye(2)) + jnp.sin(point[0])

        return jnp.mean(jax.vmap(residual)(points) ** 2)

    return loss, _field_params(numbers), (numbers.normal(32, 2),)


@SCIENCE.add("jax")
def fourier_neural_operator() -> Made:
    numbers = Numbers()

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        hidden = x @ params["in"]
        for layer in params["layers"]:
            modes = jnp.fft.rfft(hidden, axis=1)[:, :8]
            modes = jnp.einsum("bkc,kcd->bkd", modes, layer["real"] + 1j * layer["imaginary"])
            modes = jnp.pad(modes, ((0, 0), (0, 9), (0, 0)))
            hidden = jax.nn.gelu(jnp.fft.irfft(modes, n=32, axis=1) + hidden @ layer["w"])
        return jnp.mean((hidden @ params["out"] - y) ** 2)

    layers = [
        {
            "real": numbers.normal(8, 16, 16, scale=0.1),
            "imaginary": numbers.normal(8, 16, 16, scale=0.1),
            "w": numbers.normal(16, 16, scale=0.25),
        }
        for _ in range(2)
    ]
    params = {
        "in": numbers.normal(2, 16, scale=0.5),
        "layers": layers,
        "out": numbers.normal(16, 1, scale=0.25),
    }
    return loss, params, (numbers.normal(4, 32, 2), numbers.normal(4, 32, 1))


@SCIENCE.add("jax")
def sparse_graph_convolution() -> Made:
    sparse, numbers = import_module("jax.experimental.sparse"), Numbers()
    adjacency = sparse.BCOO.fromdense((numbers.state.rand(20, 20) < 0.2).astype(np.float32))

    def loss(params: Any, adjacency: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(adjacency @ (x @ params["a"]))
        return cross_entropy(adjacency @ (hidden @ params["b"]), labels)

    params = {"a": numbers.normal(8, 16, scale=0.3), "b": numbers.normal(16, 4, scale=0.3)}
    return loss, params, (adjacency, numbers.normal(20, 8), numbers.integers(4, 20))


@SCIENCE.add("jax")
def state_space_s5() -> Made:
    numbers = Numbers()

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        rates = -jnp.exp(params["decay"]) + 1j * params["frequency"]
        steps = jnp.exp(rates * jnp.exp(params["step"]))
        into = ((steps - 1) / rates)[:, None] * (params["b"][0] + 1j * params["b"][1])
        inputs = x @ params["encoder"]
        driven = jnp.einsum("bth,nh->btn", inputs, into)
        _, states = jax.lax.associative_scan(
            lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1]),
            (jnp.broadcast_to(steps, driven.shape), driven),
            axis=1,
        )
        out = (states @ (params["c"][0] + 1j * params["c"][1]).T).real
        hidden = jax.nn.gelu(2 * out + params["skip"] * inputs)
        return cross_entropy(hidden.mean(1) @ params["decoder"], labels)

    params = {
        "decay": numbers.normal(8, scale=0.1) - np.float32(0.7),
        "frequency": numbers.normal(8),
        "step": numbers.normal(8, scale=0.1) - np.float32(3),
        "b": [numbers.normal(8, 16, scale=0.2) for _ in range(2)],
        "c": [numbers.normal(16, 8, scale=0.2) for _ in range(2)],
        "skip": numbers.normal(16),
        "encoder": numbers.normal(4, 16, scale=0.5),
        "decoder": numbers.normal(16, 5, scale=0.25),
    }
    return loss, params, (numbers.normal(4, 20, 4), numbers.integers(5, 4))


@SCIENCE.add("jax")
def state_space_selective() -> Made:
    numbers = Numbers()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        inputs = x @ params["in"]
        steps = jax.nn.softplus(inputs @ params["step"])
        decay = jnp.exp(steps[..., None] * -jnp.exp(params["a"]))
        driven = (steps * inputs)[..., None] * (inputs @ params["b"])[:, :, None]
        _, states = jax.lax.associative_scan(
            lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, driven), axis=1
        )
        out = jnp.einsum("btdn,btn->btd", states, inputs @ params["c"])
        out = (out + params["skip"] * inputs) * jax.nn.silu(x @ params["gate"])
        return jnp.mean((out @ params["out"] - x) ** 2)

    shapes = {
        "in": (16, 32, 0.25),
        "step": (32, 32, 0.1),
        "a": (32, 4, 0.3),
        "b": (32, 4, 0.2),
        "c": (32, 4, 0.2),
        "gate": (16, 32, 0.25),
        "out": (32, 16, 0.2),
    }
    params = {name: numbers.normal(m, n, scale=s) for name, (m, n, s) in shapes.items()}
    return loss, {**params, "skip": numbers.normal(32)}, (numbers.normal(2, 24, 16),)


@SCIENCE.add("equinox")
def equinox_checkpointed_loops() -> Made:
    internal, numbers = import_module("equinox.internal"), Numbers()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        def turn(state: Any) -> Any:
            return state[0] + 1, jnp.tanh(state[1] @ params["w"]) + state[1]

        def goes_on(state: Any) -> Any:
            return state[0] < 5

        for kind in ("checkpointed", "bounded"):
            _, x = internal.while_loop(goes_on, turn, (0, x), kind=kind, max_steps=8)
        made, _ = internal.scan(
            lambda carry, t: (jnp.tanh(carry @ params["w"]) + t, None),
            x,
            jnp.arange(6.0),
            kind="checkpointed",
            checkpoints=3,
        )
        return jnp.mean(made**2)

    return loss, {"w": numbers.normal(16, 16, scale=0.2)}, (numbers.normal(4, 16),)


@SCIENCE.add("jax-md", "jax_md")
def jax_md_force_matching() -> Made:
    space, energy = import_module("jax_md.space"), import_module("jax_md.energy")
    numbers = Numbers(3)
    displacement, _ = space.periodic(5.0)
    soft = energy.soft_sphere_pair(displacement)

    def loss(params: Any, positions: jax.Array) -> jax.Array:
        def total(positions: jax.Array) -> jax.Array:
            def features(atom: jax.Array) -> jax.Array:
                away = jax.vmap(lambda other: displacement(atom, other))(positions)
                square = jnp.sum(away**2, -1)[:, None]
                return jnp.sum(jnp.exp(-square * params["widths"]), 0)

            hidden = jnp.tanh(jax.vmap(features)(positions) @ params["w"])
            return jnp.sum(hidden @ params["out"]) + soft(positions)

        return jnp.mean(jax.grad(total)(positions) ** 2)

    params = {
        "widths": np.abs(numbers.normal(8)) + np.float32(0.1),
        "w": numbers.normal(8, 16, scale=0.3),
        "out": numbers.normal(16, scale=0.3),
    }
    return loss, params, (np.asarray(numbers.state.rand(12, 3) * 5, np.float32),)
