"""Whether a random program under `autocast` computes what it must.

Two questions, and both can find what the other cannot. *Is it the same function?* Without rounding
the program under `autocast` and the plain one agree to about 1e-12: an operation left out, a wrong
operand or a gradient that is too large by a millionth is found, on any program, without running
it. *Is it rounded no more than it says?* What the compiled program returns is compared with the
exact result, and may differ from it by some times what random roundings of the same program do.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import halfstep
from halfstep._base.jaxprs import ClosedJaxpr
from tests._jaxprs import equations
from tests.fuzz._evaluate import (
    Evaluator,
    Round,
    Unsupported,
    at_random,
    constants_of,
    exactly,
    moved,
)
from tests.fuzz._generate import random_program, random_values
from tests.fuzz._program import Program, is_float, is_key

SAME = 1e-9
"""By how much two exact results may differ, as a share of the largest number: NumPy adds in another
order where operations are the same, and 1e-12 has been seen."""
SENSITIVE = 1e3
"""The same, in terms of what a relative change of 1e-13 in every operation does."""
SAMPLES = 6
ROUNDED = 6.0
"""By how much a result may differ from the exact one, in terms of the largest deviation that random
roundings make. Six samples of a deviation are within a factor of three of what it can be, and XLA
adds in orders of its own."""


class Failure(AssertionError):
    """A program that computes something else; `kind` is the question that found it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Skipped(Exception):
    """A program that says nothing, and why."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a program is cast.

    Attributes:
        policy: For `autocast`.
        options: Of `autocast`.
        around: What is done with the gradient function: nothing, `vmap`, `scan`, ...
    """

    policy: halfstep.Policy
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    around: str = "plain"

    def __str__(self) -> str:
        more = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{self.policy}{more}, {self.around}"


@dataclasses.dataclass
class Case:
    """A program with its numbers.

    Attributes:
        program: The program.
        parameters: How many of its arguments are parameters.
        values: Its arguments.
        seed: From which all of it was made.
    """

    program: Program
    parameters: int
    values: list[Any]
    seed: int

    def moving(self) -> list[int]:
        """Numbers of the arguments that are differentiated by: the float32 ones."""
        return [
            number
            for number, aval in enumerate(self.program.arguments)
            if aval.dtype == jnp.float32 and 0 not in aval.shape
        ]

    def gradient(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Value, results and gradients of a weighted sum of a function's results."""
        moving = self.moving()
        weights = np.random.RandomState(self.seed + 1)
        avals = [self.program.values()[number] for number in self.program.returned]
        factors = [np.float32(weights.randn(*aval.shape)) for aval in avals]

        def loss(given: Sequence[Any], values: Sequence[Any]) -> Any:
            everything = list(values)
            for number, value in zip(moving, given, strict=True):
                everything[number] = value
            results = function(
                {f"w{number}": everything[number] for number in range(self.parameters)},
                *everything[self.parameters :],
            )
            terms = [
                # `*` of two constants would be computed when the program is traced, and rounded.
                jnp.sum(jax.lax.mul(jax.lax.convert_element_type(result, jnp.float32), factor))
                for result, factor in zip(results, factors, strict=True)
                if is_float(result)
            ]
            return sum(terms, jnp.float32(0)), tuple(results)

        def run(*values: Any) -> Any:
            given = [values[number] for number in moving]
            made, gradients = jax.value_and_grad(loss, has_aux=True)(given, values)
            return *made, gradients

        return run

    def function(self) -> Callable[..., Any]:
        """The program as users write functions: parameters as one tree, then data."""
        program = self.program.function()

        def func(parameters: dict[str, Any], *data: Any) -> Any:
            return program(*parameters.values(), *data)

        return func


@contextlib.contextmanager
def as_users_have_it() -> Iterator[None]:
    """JAX's default promotion: these tests otherwise run with the strict one."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def make_case(seed: int) -> Case:
    """A random program with its numbers."""
    with as_users_have_it():
        program, parameters = random_program(seed)
        return Case(program, parameters, random_values(program, seed), seed)


def random_setting(reference: "Reference") -> Setting:
    """How a program is cast: half of all times just by the name of a dtype."""
    case = reference.case
    choice = random.Random(case.seed * 7919 + 13)
    compute = choice.choice(("bf16", "bf16", "f16"))
    kind = choice.choice(_SETTINGS)
    fields: dict[str, Any] = {}
    options: dict[str, Any] = {}
    match kind:
        case "rules":
            # A rule that matches nothing is an error.
            there = primitives(case)
            rules = [rule for name, rule in _RULES.items() if name in there]
            fields["rules"] = choice.sample(rules, min(len(rules), 2))
        case "keep":
            fields["keep"] = (f"parameters/w{choice.randrange(case.parameters)}",)
        case "accumulate":
            fields["accumulate"] = "f32"
        case "residuals":
            fields["residuals"] = choice.choice(("e4m3", "e5m2"))
        case "stores":
            names = [name for name in primitives(case) if name not in ("pjit",)]
            outcome = choice.choice(("keep", "recompute", "e4m3", "int4"))
            name = choice.choice(sorted(names)) if names else "*"
            fields["stores"] = (f"store:op:{choice.choice(('*', name))}={outcome}",)
        case "recipe":
            compute, fields["recipe"] = "bf16", choice.choice(("f8", "f8-e4m3", "f8-row"))
        case "islands":
            fields["stores"] = ("store:op:*=keep",)
        case "params":
            options["params"] = choice.choice(("parameters", (0, 1), ()))
        case _:
            pass
    around = choice.choice(("plain", "plain", "plain", "vmap", "scan", "remat", "twice"))
    return Setting(halfstep.Policy(compute=compute, **fields), options, around)


def primitives(case: Case) -> set[str]:
    """The names of all operations of a program, forward."""
    with as_users_have_it():
        forward = traced(case.program.function(), case.values)
    return {equation.primitive.name for equation in equations(forward)}


_SETTINGS = (
    *("dtype",) * 9,
    *("rules", "keep", "accumulate", "residuals", "recipe", "islands", "params"),
    *("stores", "stores"),
)
_RULES = {
    name: f"op:{name}={precision}"
    for name, precision in (
        ("tanh", "compute"),
        ("exp", "compute"),
        ("reduce_sum", "compute"),
        ("dot_general", "float32"),
        ("mul", "float32"),
        ("add", "as_traced"),
        ("div", "widest"),
    )
}


def cast(case: Case, setting: Setting, function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient function of a program under `autocast`."""
    low = halfstep.autocast(function, setting.policy, **setting.options)
    if setting.around == "twice":
        low = halfstep.autocast(low, setting.policy, **setting.options)
    gradient = case.gradient(low)
    return _AROUND[setting.around](case, gradient)


def _mapped(case: Case, gradient: Callable[..., Any]) -> Callable[..., Any]:
    moving = set(case.moving())
    axes = tuple(0 if number in moving else None for number in range(len(case.values)))

    def run(*values: Any) -> Any:
        stacked = [
            jnp.stack([value, value]) if number in moving else value
            for number, value in enumerate(values)
        ]
        return jax.tree.map(lambda leaf: leaf[1], jax.vmap(gradient, axes)(*stacked))

    return run if moving else gradient


def _looped(case: Case, gradient: Callable[..., Any]) -> Callable[..., Any]:
    del case

    def run(*values: Any) -> Any:
        _, made = jax.lax.scan(
            lambda carry, _: (carry, gradient(*values)), jnp.int32(0), None, length=2
        )
        return jax.tree.map(lambda leaf: leaf[1], made)

    return run


_AROUND: dict[str, Callable[[Case, Callable[..., Any]], Callable[..., Any]]] = {
    "plain": lambda _, gradient: gradient,
    "twice": lambda _, gradient: gradient,
    "vmap": _mapped,
    "scan": _looped,
    "remat": lambda _, gradient: jax.checkpoint(gradient),
}


def traced(function: Callable[..., Any], values: Sequence[Any]) -> ClosedJaxpr:
    """A function as a program."""
    return jax.make_jaxpr(function)(*values)


class Reference:
    """The plain program: its exact results, and how much they depend on roundings."""

    def __init__(self, case: Case) -> None:
        self.case = case
        with as_users_have_it():
            try:
                self.program = traced(case.gradient(case.function()), case.values)
            except Exception as error:
                raise Skipped(f"JAX refuses the plain program: {error}"[:200]) from error
            self.constants = constants_of(self.program)
            try:
                self.exact = Evaluator()(self.program, case.values)
            except Unsupported as error:
                raise Skipped(str(error)) from error

    def evaluated(self, low: ClosedJaxpr, rounding: Round = exactly) -> list[Any]:
        """The results of this program under `autocast`."""
        return Evaluator(rounding, constants=self.constants)(low, self.case.values)

    def sampled(self, low: ClosedJaxpr, seeds: Iterable[int], strength: float = 1.0) -> list[Any]:
        """The same, each time with other random roundings."""
        return [
            Evaluator(at_random(seed, strength), models_rounding=True, constants=self.constants)(
                low, self.case.values
            )
            for seed in seeds
        ]

    def names(self) -> list[str]:
        """What each number of `exact` is."""
        results = len(self.case.program.returned)
        return [
            "the loss",
            *(f"result {number}" for number in range(results)),
            *(f"the gradient of argument {number}" for number in self.case.moving()),
        ]


def check(
    case: Case,
    setting: Setting,
    *,
    questions: Sequence[str] = ("function", "rounding"),
    plain: Reference | None = None,
) -> str:
    """Raise if a program under `autocast` computes something else.

    Args:
        case: The program.
        setting: How it is cast.
        questions: What is asked; for `"rounding"` it is compiled and run.
        plain: What it is compared with; its own plain program, unless an error was planted.

    Returns:
        How far it came: "same", or "same, run".
    """
    reference = plain or Reference(case)
    with as_users_have_it():
        function = cast(case, setting, case.function())
        try:
            low = traced(function, case.values)
        except Exception as error:
            if refused(error):
                raise Skipped(f"refused: {error}"[:100]) from error
            _jax_itself(case, setting)
            raise Failure("tracing", f"{type(error).__name__}: {error}"[:500]) from error
        avals: list[tuple[Any, Any]] = list(
            zip(reference.program.out_avals, low.out_avals, strict=True)
        )
        for name, (was, became) in zip(reference.names(), avals, strict=True):
            if (was.shape, was.dtype) != (became.shape, became.dtype):
                raise Failure("types", f"{name} is {was}, and {became} under autocast")
        try:
            own = reference.evaluated(low)
        except Unsupported as error:
            raise Skipped(str(error)) from error
        if "function" in questions:
            _same_function(reference, low, own)
        if "rounding" not in questions:
            return "same"
        return _rounded_as_said(reference, low, own, function, case)


def _jax_itself(case: Case, setting: Setting) -> None:
    """Raise if JAX cannot do with the plain program what is done with the cast one."""
    try:
        traced(_AROUND[setting.around](case, case.gradient(case.function())), case.values)
    except Exception as error:
        raise Skipped(f"JAX refuses the plain program: {error}"[:200]) from error


def refused(error: Exception) -> bool:
    """Whether a program is one that halfstep says it cannot cast."""
    reasons = "have no second derivatives", "is for nothing in this function"
    return any(reason in str(error) for reason in reasons)


def _finite(value: Any) -> bool:
    return isinstance(value, np.ndarray) and bool(np.all(np.isfinite(value)))


def _same_function(reference: Reference, low: ClosedJaxpr, got: Sequence[Any]) -> None:
    different = [
        place
        for place, (want, have) in enumerate(zip(reference.exact, got, strict=True))
        if isinstance(want, np.ndarray) and _finite(want) and apart(want, have) > SAME
    ]
    if not different:
        return
    # The plain program, or the cast one, may itself make much of a difference of 1e-13.
    deviations = [0.0] * len(got)
    for seed in range(4):
        for program, exact in ((reference.program, reference.exact), (low, got)):
            again = reference.evaluated(program, moved(seed))
            for place in different:
                deviations[place] = max(deviations[place], apart(exact[place], again[place]))
    beyond = {
        place: off
        for place in different
        if (off := apart(reference.exact[place], got[place])) > SENSITIVE * deviations[place] + SAME
    }
    if not beyond:
        return
    place = max(beyond, key=beyond.__getitem__)
    if beyond[place] <= np.finfo(np.float32).eps:
        # What depends on no argument may be computed while one of the programs is traced.
        raise Skipped("JAX rounds a constant to float32 when it traces one of the programs")
    raise Failure(
        "another function",
        f"{reference.names()[place]} differs by {beyond[place]:.3g} of its size without any "
        f"rounding, where a change of 1e-13 in all operations makes {deviations[place]:.3g}",
    )


def apart(want: Any, have: Any) -> float:
    """The largest difference, as a share of the largest number."""
    if not isinstance(want, np.ndarray) or not want.size:
        return 0.0
    if want.dtype.kind not in "fc":
        return float(not np.array_equal(want, have))
    if not _finite(have):
        return np.inf
    return float(np.max(np.abs(want - have)) / max(float(np.max(np.abs(want))), 1e-30))


def _rounded_as_said(
    reference: Reference,
    low: ClosedJaxpr,
    own: Sequence[Any],
    function: Callable[..., Any],
    case: Case,
) -> str:
    try:
        samples = reference.sampled(low, range(SAMPLES))
    except Unsupported as error:
        return f"same; not compared when run: {error}"
    got = [np.asarray(leaf) if not is_key(leaf) else leaf for leaf in _run(function, case)]
    bad = _beyond(reference, got, own, samples)
    if not bad:
        return "same, run"
    # Few samples may all be near: more of them, of twice the strength, before it counts.
    samples += reference.sampled(low, range(100, 124), 2.0)
    bad = _beyond(reference, got, own, samples)
    if not bad:
        return "same, run"
    # A result that overflows in the plain program, too, says nothing about autocast.
    plain = _run(case.gradient(case.function()), case)
    told = [text for place, text in bad.items() if _finite(np.asarray(plain[place]))]
    if told:
        raise Failure("rounding", told[0])
    return "same; not compared when run: the plain program overflows when it runs"


def _run(function: Callable[..., Any], case: Case) -> list[Any]:
    try:
        return jax.tree.leaves(jax.block_until_ready(jax.jit(function)(*case.values)))
    except Exception as error:
        raise Failure("running", f"{type(error).__name__}: {error}"[:500]) from error


def _beyond(
    reference: Reference,
    got: Sequence[Any],
    own: Sequence[Any],
    samples: Sequence[Sequence[Any]],
) -> dict[int, str]:
    """The results that are further from the exact ones than roundings can explain, and how far."""
    bad: dict[int, str] = {}
    for place, (want, have) in enumerate(zip(reference.exact, got, strict=True)):
        near = [sample[place] for sample in samples]
        if not isinstance(want, np.ndarray) or not _finite(want) or not all(map(_finite, near)):
            continue
        name = reference.names()[place]
        if want.dtype.kind not in "fc":
            if all(np.array_equal(want, sample) for sample in near) and not np.array_equal(
                want, have
            ):
                bad[place] = f"{name} is {have.ravel()[:6]}; {want.ravel()[:6]} in every sample"
            continue
        have = have.astype(np.float64)
        deviation = max((apart(own[place], sample) for sample in near), default=0.0)
        off = apart(want, have)
        # XLA's float32 functions are off by some units of the last place.
        if off > ROUNDED * deviation + 1e-5:
            bad[place] = (
                f"{name} is off by {off:.3g} of its size; random roundings make {deviation:.3g}"
            )
    return bad
