"""Whether a composed program under `autocast` is as exact as the same program cast by hand.

The oracle is the program in float64. The measure is the program in float64 whose products have
operands and results of the half dtype, with everything else exact: its error is what an expert's
casts cost. Each leaf of a result may be four times as wrong, and `FLOOR` roundings more.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

import halfstep
from tests.fuzz._compose import BATCH, SHORT, WIDTH, Composition
from tests.fuzz._compose_names import NAMES, ByHand, Either, Plain
from tests.fuzz._evaluate import Evaluator, Round, exactly, nearest, nearest_half
from tests.fuzz._program import compiled

TIMES = 4.0
"""How many times as wrong as by hand a leaf may be."""
FLOOR = 4
"""And so many roundings more, each of half an epsilon: those of the two operands of a product, of
its result, and of what is stored of it. A leaf on which casts by hand are exact has these."""
NEGLIGIBLE = 0.01
"""A leaf of a gradient that is smaller than this share of all of the gradient is measured against
that share: what cancels is as wrong as its terms."""
FEW = 8
"""A leaf of fewer numbers is by hand as wrong as the worst leaf of its tree: the error of a single
number may be small by chance."""
ILL = 0.1
"""A program on which casts by hand are this wrong says nothing, and is drawn again."""
SCALE = 256.0
"""The loss scale of float16."""

Values = tuple[Any, Any, Any, Any]
"""Parameters, the sequence, the rows that are no numbers, and the target."""
Cast = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """A leaf that is more wrong than it may be.

    Attributes:
        leaf: Its path.
        error: Its error, as a share of its norm.
        bound: The largest error that it may have.
    """

    leaf: str
    error: float
    bound: float

    def __str__(self) -> str:
        return f"{self.leaf}: error {self.error:.3g}, bound {self.bound:.3g}"


def half_dtype(made: Composition) -> Any:
    """Return the half dtype of a composition."""
    return halfstep.FORMATS[made.half].dtype


def program_of(made: Composition) -> Callable[..., Any]:
    """Return the program as a function of an arithmetic and of values."""
    return compiled(made.source(), NAMES)["program"]


def values_of(made: Composition) -> Values:
    """Return the numbers that a program takes, as float32."""
    rng = np.random.default_rng(made.seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    made_by: dict[str, Callable[[], np.ndarray]] = {
        "r": lambda: rng.uniform(0.9, 0.999, WIDTH).astype(np.float32),
        "a": lambda: normal(WIDTH) + np.float32(3),
        "g": lambda: normal(WIDTH, scale=0.5) - np.float32(3),
        "W": lambda: normal(made.length, WIDTH, WIDTH, scale=WIDTH**-0.5),
    }
    matrix = functools.partial(normal, WIDTH, WIDTH, scale=WIDTH**-0.5)
    parameters: dict[str, Any] = {
        stage: {name: made_by.get(name, matrix)() for name in sorted(names)}
        for stage, names in made.parameters().items()
    }
    parameters["o"] = matrix()
    rows = {
        "m": rng.random(made.length) < 0.75,
        "k": rng.integers(0, WIDTH, made.length).astype(np.int32),
        "i": np.arange(made.length, dtype=np.int32),
    }
    sequence = normal(made.length, BATCH, WIDTH) + np.float32(0.5)
    target = normal(*((made.length,) if made.has_rows else ()), BATCH, WIDTH)
    return parameters, sequence, rows, target


# A program with its derivative.


def _tangents(values: Values) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), values[:2]
    )


def _penalized(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program whose loss has a penalty of its gradient by the sequence."""

    def run(p: Any, x: Any, rows: Any, target: Any) -> Any:
        def loss(x: Any) -> Any:
            value, outs = program(p, x, rows, target)
            # Not of a mean: its gradient is too small for float16, and nothing scales it in here.
            return value * target.size, (value, outs)

        gradient, (value, outs) = jax.grad(loss, has_aux=True)(x)
        return value + 0.1 * jnp.mean(gradient**2), outs

    return run


def _scaled(program: Callable[..., Any], scale: float) -> Callable[..., Any]:
    """Return value and gradient of a program, under a loss scale."""

    def loss(moving: Any, rows: Any, target: Any) -> Any:
        value, outs = program(*moving, rows, target)
        return value * scale, (value, outs)

    def run(p: Any, x: Any, rows: Any, target: Any) -> Any:
        gradient, aux = jax.grad(loss, has_aux=True)((p, x), rows, target)
        return aux, jax.tree.map(lambda leaf: leaf / scale, gradient)

    return run


def derived(made: Composition, program: Callable[..., Any], cast: Cast) -> Callable[..., Any]:
    """Return a program with its derivative: a tree of results, and a tree of derivatives.

    Args:
        made: Says what is differentiated.
        program: A function of values alone.
        cast: What `autocast` is for halfstep.
    """
    scale = SCALE if made.half == "f16" else 1.0

    def run(*values: Any) -> Any:
        if made.derivative == "none":
            return cast(program)(*values), ()
        if made.derivative == "forward":
            moving = cast(lambda p, x: program(p, x, *values[2:]))
            return jax.jvp(moving, values[:2], _tangents(values))
        if made.derivative == "over reverse":
            gradient = _scaled(cast(program), scale)
            tangents = _tangents(values)
            moved = jax.jvp(lambda p, x: gradient(p, x, *values[2:]), values[:2], tangents)
            return moved[0][0], (moved[0][1], moved[1][1])
        penalized = _penalized(program) if made.derivative == "penalty" else program
        results, gradient = _scaled(cast(penalized), scale)(*values)
        # As `filter` has it: by the first argument only.
        return results, (gradient[0] if made.derivative == "filter" else gradient)

    return run


def as_halfstep_runs(made: Composition, arithmetic: Any = None, **options: Any) -> Any:
    """Return what halfstep makes of a program: a function to results and derivatives.

    Args:
        made: The program.
        arithmetic: `Plain`, or one with a planted error.
        **options: Instead of the composition's own, for `autocast`.
    """
    program = functools.partial(program_of(made), arithmetic or Plain())
    policy = made.half if made.islands else f"{made.half},store:op:*=keep"
    options = {"policy": policy, **options}
    if made.derivative != "filter":
        return derived(made, program, lambda program: halfstep.autocast(program, **options))
    scaling = halfstep.StaticLossScaling(SCALE) if made.half == "f16" else halfstep.NoLossScaling()
    transformed = halfstep.filter_value_and_grad(program, scaling, has_aux=True, **options)

    def run(*values: Any) -> Any:
        results, _, _, gradient = transformed(*values)
        return results, gradient

    return run


def by_halfstep(made: Composition, arithmetic: Any = None, **options: Any) -> Any:
    """Return the results of a program under halfstep, and its derivatives; arguments as above."""
    run = as_halfstep_runs(made, arithmetic, **options)
    if made.run == "in NumPy":
        return in_numpy(run, values_of(made), nearest)[0]
    values = jax.tree.map(jnp.asarray, values_of(made))
    return (jax.jit(run) if made.run == "compiled" else run)(*values)


def in_numpy(run: Callable[..., Any], values: Values, *roundings: Round) -> list[Any]:
    """Return what a function makes of values, evaluated in NumPy with each of some roundings."""
    traced, shapes = jax.make_jaxpr(run, return_shape=True)(*values)
    tree, leaves = jax.tree.structure(shapes), jax.tree.leaves(values)
    return [jax.tree.unflatten(tree, Evaluator(one)(traced, leaves)) for one in roundings]


def references(made: Composition) -> tuple[Any, Any]:
    """Return what the oracle makes of a program, and casts by hand."""
    program, half = program_of(made), half_dtype(made)

    def as_is(program: Callable[..., Any]) -> Callable[..., Any]:
        return program

    def either(is_rounded: Any, *values: Any) -> Any:
        return derived(made, functools.partial(program, Either(half, is_rounded)), as_is)(*values)

    if made.length <= SHORT:
        run = derived(made, functools.partial(program, ByHand(half)), as_is)
        exact, rounded = in_numpy(run, values_of(made), exactly, nearest_half)
        return exact, rounded
    # A function with a rule of its own cannot close over a traced flag: it is compiled twice.
    has_rule = any(name in made.source() for name in ("with_jvp", "with_vjp"))
    run = jax.jit(either, static_argnums=0 if has_rule else ())
    with jax.enable_x64(True):
        values = jax.tree.map(
            lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf,
            values_of(made),
        )
        exact, rounded = (jax.tree.map(np.asarray, run(flag, *values)) for flag in (False, True))
        return exact, rounded


def by_hand(made: Composition) -> Any:
    """Return what casts by hand make of a program in float32, as it is compiled."""
    program = functools.partial(program_of(made), ByHand(half_dtype(made)))
    return jax.jit(derived(made, program, lambda program: program))(*values_of(made))


# Errors.


def errors(got: Any, want: Any, share: float) -> dict[str, float]:
    """Return the error of each leaf, as a share of its norm.

    Args:
        got: A tree.
        want: What it should be.
        share: Of the tree's norm, which is the least that a leaf is measured against.
    """
    exact = jtu.tree_flatten_with_path(want)[0]
    if jtu.tree_structure(got) != jtu.tree_structure(want):
        raise ValueError(f"got {jtu.tree_structure(got)}, not {jtu.tree_structure(want)}")
    total = np.sqrt(sum(np.linalg.norm(np.ravel(leaf)) ** 2 for _, leaf in exact))
    made = {}
    for (path, leaf), value in zip(exact, jax.tree.leaves(got), strict=True):
        off = np.linalg.norm(np.ravel(np.asarray(value, np.float64) - leaf))
        size = max(np.linalg.norm(np.ravel(leaf)), share * total)
        made[jtu.keystr(path)] = float(off / size) if off else 0.0
    return made


def all_errors(got: Any, want: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Return the errors of results, and of derivatives."""
    return errors(got[0], want[0], 0.0), errors(got[1], want[1], NEGLIGIBLE)


def judge_of(made: Composition) -> "Judge":
    """Return the judge of a composed program."""
    return Judge(*references(made), half_dtype(made))


class Judge:
    """How wrong each leaf of a program's results and derivatives may be.

    Args:
        exact: The results and the derivatives of the oracle, two trees.
        hand: Those of casts by hand.
        half: The half dtype.
    """

    def __init__(self, exact: Any, hand: Any, half: Any) -> None:
        self.exact = exact
        self.eps = float(jnp.finfo(half).eps)
        self.of_hand = all_errors(hand, self.exact)
        sizes = jax.tree.map(np.size, self.exact)
        self._few = [
            {jtu.keystr(path): size < FEW for path, size in jtu.tree_flatten_with_path(tree)[0]}
            for tree in sizes
        ]

    @property
    def is_ill(self) -> bool:
        """Whether the program says nothing, because casts by hand are too wrong on it."""
        worst = [error for tree in self.of_hand for error in tree.values()]
        return not max(worst) <= ILL

    def bounds(self) -> list[dict[str, float]]:
        """Return the bounds of results and of derivatives."""
        made = []
        for hand, few in zip(self.of_hand, self._few, strict=True):
            worst = max(hand.values(), default=0.0)
            made.append(
                {
                    leaf: TIMES * (worst if few[leaf] else error) + FLOOR * self.eps / 2
                    for leaf, error in hand.items()
                }
            )
        return made

    def disagreements(self, got: Any) -> list[Disagreement]:
        """Return the leaves that are more wrong than they may be, the worst first."""
        made = []
        names = ("result", "derivative")
        for name, have, may in zip(names, all_errors(got, self.exact), self.bounds(), strict=True):
            made += [
                Disagreement(name + leaf, error, may[leaf])
                for leaf, error in have.items()
                # An error that is no number is one.
                if not error <= may[leaf]
            ]
        return sorted(made, key=lambda one: -np.nan_to_num(one.error / one.bound, nan=np.inf))
