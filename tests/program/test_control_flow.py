"""The table of structured primitives fits the installed JAX, row by row."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import halfstep
from halfstep._base.jaxprs import jaxprs_in
from halfstep._base.versions import TESTED_JAX
from halfstep._program import control_flow as table, structures
from tests.program._examples import EXAMPLES, Example

pytestmark = [pytest.mark.core, pytest.mark.wheel]
every_example = pytest.mark.parametrize("name", EXAMPLES)
# Functions of two scalars that are part of an operation: sums, maxima, updates.
COMBINERS = {"reduce", "scatter", "scatter-add", "reduce_window", "select_and_scatter_add"}


def equation_of(example: Example) -> Any:
    """The equation of a program that holds the structure which is looked for."""
    program = jax.make_jaxpr(example.function)(*example.args)
    for equation in table.equations(program.jaxpr):
        if isinstance(table.structure_of(equation.primitive.name, equation.params), example.kind):
            return equation
    raise AssertionError(f"no {example.kind.__name__} in {program}")


def structure(equation: Any) -> Any:
    return table.structure_of(equation.primitive.name, equation.params)


def values_for(equation: Any) -> list[Any]:
    """Operands of an equation: something of each shape and dtype."""
    made = []
    for number, var in enumerate(equation.invars):
        shape, dtype = var.aval.shape, var.aval.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            made.append(jnp.linspace(0.1 * number, 1.0, int(np.prod(shape))).reshape(shape))
        else:
            made.append(jnp.zeros(shape, dtype))
    return made


def as_function(inner: structures.Inner) -> Any:
    function = core.jaxpr_as_fun(inner.function)
    return lambda *values: tuple(function(*values))


def test_every_row_has_an_example():
    kinds = {example.kind for example in EXAMPLES.values()}
    assert kinds == {kind for kind in vars(structures).values() if _is_row(kind)}


def _is_row(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, structures.Structure) and bool(kind.names)


@every_example
def test_inputs_are_what_the_row_says(name: str):
    equation = equation_of(EXAMPLES[name])
    for inner in structure(equation).inner():
        if inner.operands is None:
            continue
        inputs = inner.function.jaxpr.invars
        assert len(inputs) == len(inner.operands)
        for position, (var, operand) in enumerate(zip(inputs, inner.operands, strict=True)):
            shape = equation.invars[operand].aval.shape
            if EXAMPLES[name].kind is structures.ShardMap:
                shape = (shape[0] // 4, *shape[1:])
            assert var.aval.shape == (shape[1:] if position in inner.sliced else shape)
        for position, out in zip(inner.carried, inner.function.jaxpr.outvars, strict=False):
            assert inner.is_test or inputs[position].aval.shape == out.aval.shape


@every_example
def test_bound_again_with_its_own_functions_it_computes_the_same(name: str):
    equation = equation_of(EXAMPLES[name])
    found, values = structure(equation), values_for(equation)
    functions = [as_function(inner) for inner in found.inner()]
    expected = table.bind_again(equation.primitive, equation.params, values)
    match found:
        case structures.Scan():
            consts, init, xs = found.split(values)

            def body(carry: Any, x: Any) -> Any:
                results = functions[0](*consts, *carry, *x)
                return tuple(results[: found.carries]), tuple(results[found.carries :])

            carry, ys = found.bind(body, tuple(init), tuple(xs))
            made = [*carry, *ys]
        case structures.While():
            of_test, of_body, init = found.split(values)
            made, _ = found.bind(
                lambda carry: functions[0](*of_test, *carry)[0],
                lambda carry, more: (tuple(functions[1](*of_body, *carry)), more),
                tuple(init),
                (),
            )
        case structures.Cond():
            made = found.bind(values[0], functions, *values[1:])
        case structures.Remat():
            made = found.checkpoint(functions[0])(*values)
            again = found.bind_as_traced(equation.primitive, functions[0], values)
            np.testing.assert_array_equal(again[0], expected[0])
        case structures.Jit() | structures.ShardMap():
            made = found.bind(functions[0], *values)
        case structures.CustomVmap():
            made = found.bind(lambda *given: tuple(functions[0](*given)), found.rule, *values)
            mapped, is_mapped = found.rule(2, [True], [jnp.stack([value] * 2) for value in values])
            assert list(is_mapped) == [True]
            np.testing.assert_array_equal(mapped[0][1], expected[0])
        case structures.CustomJvp():
            function, zeros = found.rule([False] * len(values))
            results = core.jaxpr_as_fun(function)(*values, *values)
            assert list(zeros) == [False] * len(expected)
            made = results[: len(expected)]
        case structures.CustomVjp():
            traced = core.jaxpr_as_fun(found.forward([True] * len(values)))(*values)
            forwarded = found.forwarded()
            stored = sum(number is None for number in forwarded)
            saved, made = iter(traced[:stored]), traced[stored:]
            kept = [next(saved) if n is None else values[n] for n in forwarded]
            gradients = found.backward(*kept, *made)
            assert [g.shape for g in gradients] == [value.shape for value in values]
        case _:
            # Never bound with other functions: those inside are for reports.
            assert found.is_opaque
            assert functions
            return
    for value, other in zip(made, expected, strict=True):
        np.testing.assert_array_equal(value, other)


class Recorded(Mapping[str, Any]):
    """Parameters that remember which of them were asked for."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.params, self.read = params, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self.params[name]

    def __contains__(self, name: object) -> bool:
        return name in self.params

    def __iter__(self) -> Iterator[str]:
        return iter(self.params)

    def __len__(self) -> int:
        return len(self.params)


@every_example
def test_a_renamed_parameter_is_named_with_the_versions_that_work(name: str):
    equation = equation_of(EXAMPLES[name])
    primitive, params = equation.primitive.name, Recorded(equation.params)
    table.structure_of(primitive, params)
    by_name = params.read
    if EXAMPLES[name].kind is structures.Opaque:
        # The row looks for functions among all parameters, whatever they are called.
        by_name &= {"_prim"} & equation.params.keys()
    optional = {"in_shardings", "out_shardings", "_split_transpose"}
    for parameter in by_name - optional:
        renamed = {k: v for k, v in equation.params.items() if k != parameter}
        renamed[f"new_{parameter}"] = equation.params[parameter]
        words = rf"`{primitive}`.*has.*`new_{parameter}`.*{TESTED_JAX[0]} to {TESTED_JAX[-1]}"
        with pytest.raises(table.JaxVersionError, match=words):
            table.structure_of(primitive, renamed)


def test_a_parameter_of_another_form_is_named():
    equation = equation_of(EXAMPLES["scan"])
    params = {k: v for k, v in equation.params.items() if k not in ("num_consts", "num_carry")}
    with pytest.raises(table.JaxVersionError, match="the parameter `ft_in` is a int of another"):
        table.structure_of("scan", {**params, "ft_in": 3})


def test_autocast_says_it_too(monkeypatch: pytest.MonkeyPatch):
    def renamed(params: Any) -> Any:
        return table._scan(table._Parameters("scan", {"jaxpr": params["jaxpr"]}))

    monkeypatch.setattr(table, "TABLE", {**table.TABLE, "scan": renamed})
    with pytest.raises(table.JaxVersionError, match=r"`scan` in a way .* `ft_in` is missing"):
        halfstep.autocast(EXAMPLES["scan"].function, "bf16")(*EXAMPLES["scan"].args)


@pytest.mark.skipif(
    not hasattr(jax.custom_vjp, "defvjp_with_logs"), reason="this JAX has no such rules"
)
def test_a_backward_rule_that_logs_is_refused():
    @jax.custom_vjp
    def func(x: Any) -> Any:
        return x * 2.0

    func.defvjp_with_logs(
        lambda x: (x * 2.0, None), lambda _, g: ((g * 2.0,), {"norm": jnp.linalg.norm(g)})
    )
    loss = halfstep.autocast(lambda x: func(x).sum(), "bf16")
    with pytest.raises(NotImplementedError, match=r"and `autocast` cannot hand logs on"):
        jax.grad(loss)(jnp.ones(3))


@every_example
def test_whatever_holds_a_function_is_in_the_table(name: str):
    example = EXAMPLES[name]
    for transform in (lambda f: f, jax.jit, jax.vmap, jax.checkpoint):
        args = example.args if transform is not jax.vmap else [x[None] for x in example.args]
        if transform is jax.vmap and name in ("shard_map", "composite", "linear_call"):
            continue  # JAX has no rule for these, or not for this mesh.
        program = jax.make_jaxpr(transform(example.function))(*args)
        for equation in table.equations(program.jaxpr):
            if any(jaxprs_in(equation.params)):
                assert equation.primitive.name in {*table.TABLE, *COMBINERS}
