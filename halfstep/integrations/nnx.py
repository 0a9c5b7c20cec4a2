"""Compute gradients and updates of Flax NNX modules, which change in place.

`halfstep.filter_value_and_grad` takes NNX modules that were split into pure state. This module
takes the module itself, as `nnx.value_and_grad` and `nnx.Optimizer` do.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax.tree_util as jtu
from flax import nnx
from jaxtyping import Array, Bool

from halfstep._base import (
    argument_names,
    check_options,
    checked,
    listed,
    option_names,
    refusing,
)
from halfstep._policy import Policy
from halfstep._training import (
    AbstractLossScaling,
    Verdict,
    filter_value_and_grad,
    gated,
    select_tree,
    split_result,
    without_value,
)

# These are committed with skipped steps too. With the old counters, the next step would draw the
# same dropout mask again. Values that a module sowed are needed most after a bad step.
_ALWAYS_COMMITTED = (nnx.RngState, nnx.Intermediate)

Path = tuple[Any, ...]
_State = nnx.State[Any, Any]


class _Kept(NamedTuple):
    """The state of one call. It has its own type so that no auxiliary output is taken for it."""

    variables: _State


def _is_variable(node: object) -> TypeGuard[nnx.Variable[Any]]:
    return isinstance(node, nnx.Variable)


def _is_object(argument: object) -> bool:
    """Return whether an argument can change in place: it has variables and is not pure state."""
    nodes = jtu.tree_leaves(argument, is_leaf=_is_variable)
    return not isinstance(argument, nnx.State) and any(map(_is_variable, nodes))


def _is_kept(_path: Path, node: object) -> bool:
    return _is_variable(node) and not isinstance(node, nnx.Param)


def _flat(state: _State) -> dict[Path, Any]:
    return dict(nnx.to_flat_state(state))


def _value(node: object) -> Any:
    return node.get_raw_value() if _is_variable(node) else node


def _filled(state: _State, values: Mapping[Any, Any]) -> _State:
    """Return a state of the same variables with other values, given as nested dictionaries."""
    nodes = _flat(state)
    for path, node in nodes.items():
        value = functools.reduce(lambda tree, key: tree[key], path, values)
        nodes[path] = node.copy(value) if _is_variable(node) else value
    return nnx.from_flat_state(nodes)


def _unused(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "_"
    return name


class _ModuleCall:
    """One call of a function with NNX objects among its arguments, as a call of a pure function.

    All objects are split together, the model first, so that variables that two of them share stay
    shared. Variables are of three kinds: `params` are differentiated; `kept` variables (statistics,
    counters) keep their dtype and are returned changed; `frozen` variables are never returned.
    """

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], wrt: Any
    ):
        if not args or not _is_object(args[0]):
            got = f"got {type(args[0]).__name__}" if args else "there is none"
            raise TypeError(
                f"the first positional argument must be an NNX module with variables; {got}. "
                "For pytrees and pure states, use halfstep.filter_value_and_grad."
            )
        self.func = func
        self.names = (*argument_names(func, len(args)), *kwargs)
        positions = [n for n, value in enumerate(args) if _is_object(value)]
        keywords = [name for name, value in kwargs.items() if _is_object(value)]
        self.slots = (*positions, *keywords)
        self.objects = (*(args[n] for n in positions), *(kwargs[name] for name in keywords))
        # The objects' places stay, but empty, so that path rules still find the function's own
        # names.
        self.args = tuple(None if n in positions else value for n, value in enumerate(args))
        self.kwargs = {k: None if k in keywords else value for k, value in kwargs.items()}
        is_wrt = nnx.filterlib.to_predicate(wrt)

        def is_trained(path: Path, node: object) -> bool:
            # The filter sees the path below the model, as in `nnx.state(model, wrt)`.
            return path[0] == 0 and is_wrt(path[1:], node)

        # The order matters, because each variable goes to the first filter that matches: a variable
        # that `wrt` selects is trained even if its type is state.
        self.graphdef, params, self.kept, self.frozen = nnx.split(
            self.objects, is_trained, _is_kept, ...
        )
        if not _flat(params):
            kinds = {type(node).__name__ for node in _flat(nnx.state(args[0])).values()}
            raise ValueError(
                "there is nothing to differentiate: the model has no variable that `wrt` selects. "
                f"Pass wrt= for one of {', '.join(sorted(kinds))}; it is {wrt!r}."
            )
        self.params = params[0]

    def run(
        self,
        params: _State,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kept: _State,
        frozen: _State,
    ) -> tuple[Any, ...]:
        """Return the function's result, its kept variables afterwards, and those it created."""
        trained = nnx.State({0: params})
        # The objects are copies: this runs inside a trace, and tracers must not be written into the
        # caller's objects.
        objects = nnx.merge(self.graphdef, trained, kept, frozen, copy=True)
        filled, keywords = list(args), dict(kwargs)
        for slot, value in zip(self.slots, objects, strict=True):
            if isinstance(slot, str):
                keywords[slot] = value
            else:
                filled[slot] = value
        result = self.func(*filled, **keywords)
        after = _flat(nnx.state(objects))
        constant, known = {**_flat(trained), **_flat(frozen)}, _flat(kept)
        for path in (*constant, *known):
            if path not in after:
                raise ValueError(
                    f"the function removed `{self._name(path)}`; a step must leave every variable "
                    "in its place. Set it to another value instead."
                )
        for path, node in constant.items():
            # Compare by identity: the values are tracers, and a variable that was not assigned to
            # has the same tracer.
            if _value(after[path]) is not _value(node):
                warnings.warn(
                    f"the function assigns to `{self._name(path)}`, which is a parameter or no "
                    "variable. The assignment is lost after the call: parameters change by the "
                    "optimizer only. Keep state in an nnx.Variable.",
                    stacklevel=2,
                )
        # Variables that the first call makes, such as a cache or values that a module sows.
        created = {p: node for p, node in after.items() if p not in constant and p not in known}
        same = {path: after[path] for path in known}
        return result, nnx.from_flat_state(same), nnx.from_flat_state(created)

    def _name(self, path: Path) -> str:
        slot = self.slots[path[0]]
        root = slot if isinstance(slot, str) else self.names[slot]
        return "/".join(map(str, (root, *path[1:])))

    def commit(self, finite: Verdict | Bool[Array, ""], kept: _State, created: _State) -> None:
        """Write the function's changes into the objects; statistics only if `finite`."""
        old, new = _flat(self.kept), _flat(kept)
        for path, node in new.items():
            if not isinstance(node, _ALWAYS_COMMITTED):
                # Statistics of a batch that overflowed are not finite either, and would stay so in
                # every later step.
                value = select_tree(finite, _value(node), _value(old[path]))
                new[path] = node.copy(value)
        nnx.update(self.objects, nnx.from_flat_state({**new, **_flat(created)}))


@checked
def value_and_grad(
    func: Callable[..., Any],
    scaling: AbstractLossScaling | None = None,
    *,
    policy: Policy | str = "bf16",
    has_aux: bool = False,
    wrt: Any = nnx.Param,
    microbatches: int = 1,
    **options: Any,
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Differentiate like `nnx.value_and_grad`, in mixed precision and with loss scaling.

    `autocast` rewrites `func`. With a policy such as `"bf16:inputs"`, the model's parameters and
    the other floating-point arguments are cast instead.

    Variables that are not an `nnx.Param` (batch statistics, caches, random state) keep their dtype,
    and the changes that `func` makes to them are written into the module. Random state is always
    written, so that the step after a skipped one draws other numbers; everything else is written
    only if the step is finite. Other NNX objects among the arguments, such as `nnx.Rngs`, are
    treated the same way.

    Args:
        func: A function whose first argument is an NNX module and which returns a scalar loss, or
            `(loss, aux)` with `has_aux`.
        scaling: The loss scaling. `None` means `NoLossScaling()`, which float16 refuses.
        policy: A `Policy`, or a string that stands for one.
        has_aux: Whether `func` returns an auxiliary output.
        wrt: An NNX filter that selects which variables of the first argument are differentiated.
        microbatches: The number of iterations in which the batch is processed. Each iteration
            passes the module's statistics and random state to the next.
        **options: The options of `halfstep.filter_value_and_grad` except `carry`: `keep`,
            `check_finite`, `batch`, `axis_names`, ... A path rule for a parameter is
            `"model/norm/scale"`, with the name that `func` gives its first argument.

    Returns:
        A function of the same arguments that returns `(value, scaling, finite, grads)`, where
        `value` is the loss, or `(loss, aux)`; `grads` is an `nnx.State`, and
        `finite.where(grads)` names the leaf that is not finite.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp
        import optax
        from flax import nnx
        from halfstep.integrations import nnx as mixed


        def loss(model, x, y):
            return jnp.mean((model(x) - y) ** 2)


        @nnx.jit
        def step(model, optimizer, scaling, x, y):
            value, scaling, finite, grads = mixed.value_and_grad(loss, scaling, policy="f16")(
                model, x, y
            )
            mixed.optimizer_update(optimizer, model, grads, finite)
            return value, scaling, finite


        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        scaling = halfstep.DynamicLossScaling()
        x, y = jnp.ones((8, 4)), jnp.zeros((8, 2))
        value, scaling, finite = step(model, optimizer, scaling, x, y)
        assert finite
        assert model.kernel.dtype == jnp.float32
        ```
    """
    if "carry" in options:
        raise TypeError(
            "`carry` is not an option here: an NNX module's state is handed from microbatch to "
            f"microbatch by itself; got {options['carry']!r}. Leave it out."
        )
    check_options(value_and_grad, options, _options())
    # This call is only for its checks, so that a mistake is reported where it is written.
    filter_value_and_grad(
        func, scaling, policy=policy, has_aux=has_aux, microbatches=microbatches, **options
    )

    def with_objects(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        call = _ModuleCall(func, args, kwargs, wrt)
        # The state is passed as keyword arguments, under names that the function does not use
        # itself. Positions, and the names that path rules look at, stay as they are.
        state_name = _unused(f"{call.names[0]}_state", call.names)
        frozen_name = _unused(f"{call.names[0]}_frozen", call.names)

        @functools.wraps(func)
        def pure(params: Mapping[Any, Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            kept, frozen = kwargs.pop(state_name).variables, kwargs.pop(frozen_name)
            trained = _filled(call.params, params)
            result, kept, created = call.run(trained, (None, *args), kwargs, kept, frozen)
            loss, aux = split_result(result, has_aux)
            return loss, (_Kept(kept), created, aux)

        # Frozen variables count as parameters, so that autocast casts them only once, like weights.
        params = (0, frozen_name, *listed(options.get("params", ())))
        gradient = filter_value_and_grad(
            pure,
            scaling,
            policy=policy,
            has_aux=True,
            microbatches=microbatches,
            carry=state_name if microbatches > 1 else None,
            **{**options, "params": params},  # pyright: ignore[reportArgumentType]
        )
        state = {state_name: _Kept(call.kept), frozen_name: call.frozen}
        # Parameters are passed as plain values: a variable that `wrt` selects is a parameter even
        # if its type is state.
        (loss, (kept, created, aux)), adjusted, finite, grads = gradient(
            nnx.to_pure_dict(call.params), *call.args[1:], **call.kwargs, **state
        )
        call.commit(finite, kept.variables, created)
        grads = _filled(call.params, grads)
        return (loss, aux) if has_aux else loss, adjusted, finite, grads

    return refusing(value_and_grad, _options(), func, with_objects)


def _options() -> list[str]:
    """Return the names of the options of `value_and_grad`."""
    own, others = option_names(value_and_grad), option_names(filter_value_and_grad)
    names = [*own, *(name for name in others if name not in own)]
    return [name for name in names if name not in ("options", "carry")]


@checked
def grad(
    func: Callable[..., Any], scaling: AbstractLossScaling | None = None, **options: Any
) -> Callable[..., tuple[Any, ...]]:
    """Differentiate like `nnx.grad`, in mixed precision and with loss scaling.

    Args:
        func: A function whose first argument is an NNX module and which returns a scalar loss, or
            `(loss, aux)` with `has_aux=True`.
        scaling: The loss scaling. `None` means `NoLossScaling()`, which float16 refuses.
        **options: The options of `value_and_grad`.

    Returns:
        A function of the same arguments that returns `(scaling, finite, grads)`, or
        `(scaling, finite, grads, aux)` with `has_aux=True`.

    Example:
        ```python
        import jax.numpy as jnp
        from flax import nnx
        from halfstep.integrations import nnx as mixed

        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        gradient = mixed.grad(lambda model, x: jnp.mean(model(x) ** 2), policy="bf16")
        scaling, finite, grads = gradient(model, jnp.ones((8, 4)))
        assert grads["kernel"].dtype == jnp.float32
        ```
    """
    check_options(grad, options, [*_options(), "carry"])
    with_value = value_and_grad(func, scaling, **options)
    made = without_value(with_value, has_aux=options.get("has_aux", False))
    return refusing(grad, _options(), func, made)


@checked
def optimizer_update(optimizer: Any, model: Any, grads: Any, finite: Any, **kwargs: Any) -> None:
    """Run `optimizer.update(model, grads)` in place if the gradients are finite, else do nothing.

    With finite gradients, the model and the optimizer are the same as after
    `nnx.Optimizer.update`, bit for bit. The optimizer's own step counter does not count a skipped
    step.

    Args:
        optimizer: An `nnx.Optimizer`.
        model: The module that the optimizer was made for.
        grads: Gradients as `value_and_grad` returns them.
        finite: The verdict that `value_and_grad` returns, or a boolean scalar. A verdict that was
            not checked compiles no gate, only the update itself.
        **kwargs: Passed to `optimizer.update`, such as `value` for optimizers that need the loss.

    Example:
        ```python
        import jax.numpy as jnp
        import optax
        from flax import nnx
        from halfstep.integrations import nnx as mixed

        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        grads = nnx.grad(lambda model: jnp.mean(model(jnp.ones(4)) ** 2))(model)
        mixed.optimizer_update(optimizer, model, grads, jnp.asarray(False))
        assert optimizer.step[...] == 0
        ```
    """
    if isinstance(optimizer, nnx.ModelAndOptimizer) or not isinstance(optimizer, nnx.Optimizer):
        raise TypeError(
            "required an nnx.Optimizer, which is separate from its model; got "
            f"{type(optimizer).__name__}. Write nnx.Optimizer(model, tx, wrt=nnx.Param); for an "
            "Optax optimizer on pure state use halfstep.optimizer_update."
        )
    model_def, params, rest = nnx.split(model, optimizer.wrt, ...)
    if not jtu.tree_leaves(params):
        raise TypeError(
            "`model` must be the module that the optimizer was made with; got "
            f"{type(model).__name__}, which has no variables to train. Write "
            "optimizer_update(optimizer, model, grads, finite)."
        )
    # Objects are split into pure state, since a gate chooses between pytrees. The objects
    # themselves are updated afterwards.
    optimizer_def, optimizer_state = nnx.split(optimizer)

    def commit(state: tuple[Any, Any]) -> tuple[Any, Any]:
        # These are fresh objects: the caller's cannot be changed inside the gate's own trace.
        inner_model = nnx.merge(model_def, state[0], rest, copy=True)
        inner_optimizer = nnx.merge(optimizer_def, state[1], copy=True)
        try:
            inner_optimizer.update(inner_model, grads, **kwargs)
        except Exception as error:
            # Flax maps over both trees at once, and does not say which one is wrong.
            wanted, given = jtu.tree_structure(state[0]), jtu.tree_structure(grads)
            if wanted == given:
                raise
            raise ValueError(
                "`grads` must have the structure of the variables of `model` that the optimizer "
                f"trains, {wanted}; got {given}. Pass the model that the optimizer was made with, "
                "and what `grad` returns for it."
            ) from error
        return nnx.state(inner_model, optimizer.wrt), nnx.state(inner_optimizer)

    params, optimizer_state = gated(finite, commit, (params, optimizer_state))
    nnx.update(model, params)
    nnx.update(optimizer, optimizer_state)
