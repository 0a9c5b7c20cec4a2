"""Composed programs, from a seed: loops that hold state, among all of JAX's transformations."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator

from tests.fuzz._compose_bodies import BODIES, Reading

WIDTH, BATCH = 8, 3
STATE_FROM = 128
"""The number of iterations from which a carry is state if contractions of weights that all
iterations share lie on some of its paths."""
LOOPS = ("scan", "reversed", "unrolled", "two scans", "fori", "while")
SHORT = 100
"""The number of iterations up to which NumPy evaluates a program sooner than XLA compiles it."""
DRIVES = {
    "as given": 't["u"]',
    "outside": 't["u"]',
    "inside": 'C.mm(t["u"], q["w"])',
    "tanh": 'jnp.tanh(C.mm(t["u"], q["w"]))',
    "named": 'checkpoint_name(C.mm(t["u"], q["w"]), "made")',
    "positive": 'jax.nn.softplus(C.mm(t["u"], q["w"]))',
    "half positive": 'C.mm(t["u"], q["w"]) + 1.0',
}
"""How the input of a body is made of a row."""
POLICIES = (
    "policy=policies.everything_saveable",
    "policy=policies.nothing_saveable",
    "policy=policies.dots_saveable",
    "policy=policies.dots_with_no_batch_dims_saveable",
    'policy=policies.save_only_these_names("made")',
)
CHECKPOINTS = {
    "checkpoint": "",
    **{f"checkpoint, {policy.partition('.')[2]}": f", {policy}" for policy in POLICIES},
}
AROUND_STEP = {
    "jit": "jax.jit({f})",
    **{name: f"jax.checkpoint({{f}}{options})" for name, options in CHECKPOINTS.items()},
    "custom_jvp": "with_jvp({f})",
    "custom_vjp": "with_vjp({f})",
    "custom_vjp of inputs": 'with_vjp({f}, "inputs")',
    "branched": "branched({f})",
    "guarded": "guarded({f})",
    "selected": "selected({f})",
    "twice": "twice({f})",
    "vmap": "mapped({f}, 0, 0)",
    "vmap, second axis": "mapped({f}, 1, 0)",
    "vmap, all on the second axis": "mapped({f}, 1, 1)",
}
"""What is around a step, as text."""
VMAPS = ("vmap", "vmap, second axis", "vmap, all on the second axis")
AROUND_STAGE = {
    **{
        name: AROUND_STEP[name]
        for name in ("jit", *CHECKPOINTS, "custom_jvp", "custom_vjp", "custom_vjp of inputs")
    },
    "vmap": "mapped_stage({f}, 1, {batch})",
    "vmap, second axis": "mapped_stage({f}, 2, {batch})",
    "vmap, first axis": "mapped_stage({f}, 0, {batch})",
}
"""What is around a whole loop."""
AROUND_PROGRAM = {
    "jit": "jitted_program({f})",
    **{name: f"recomputed_program({{f}}{options})" for name, options in CHECKPOINTS.items()},
    "vmap": "mapped_program({f})",
}
"""What is around a whole program."""
DERIVATIVES = {"reverse": 8, "filter": 5, "forward": 4, "penalty": 1, "over reverse": 1, "none": 1}
"""What is differentiated how, with weights: forward over reverse and reverse over reverse too."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One loop of a program.

    Attributes:
        body: The name of its body.
        loop: The kind of loop.
        drive: How a body's input is made.
        decay: Of bodies that have one.
        step: What is around one iteration, inner first.
        whole: What is around the loop, inner first.
        handed: Whether `"rows"` or the last carry (`"final"`) goes on.
    """

    body: str
    loop: str = "scan"
    drive: str = "inside"
    decay: float = 0.9
    step: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    handed: str = "rows"

    def is_activation(self, length: int) -> bool:
        """Whether the carry of its body is an activation, which an expert holds in 16 bits."""
        reading = BODIES[self.body].reading
        if reading is Reading.STATE or self.loop == "while":
            return False
        if reading is Reading.THROUGH and not {"guarded", "selected"} & set(self.step):
            return True
        if reading is Reading.OWN:
            return True
        return length * (2 if "twice" in self.step else 1) < STATE_FROM


@dataclasses.dataclass(frozen=True)
class Composition:
    """A composed program and how it is cast, differentiated and run.

    Attributes:
        seed: Of its numbers.
        stages: Its loops, each of which reads what the last one has made.
        length: The number of iterations.
        outer: What is around the program, inner first.
        derivative: What is differentiated, one of `DERIVATIVES`.
        half: `"bf16"` or `"f16"`.
        islands: Whether anything is made again for the backward pass.
        run: How halfstep's program is run: `"compiled"`, `"eager"`, or `"in NumPy"`, where every
            operation is rounded to the nearest number. That takes no time to compile, so that
            most short programs are run like this.
    """

    seed: int
    stages: tuple[Stage, ...]
    length: int
    outer: tuple[str, ...] = ()
    derivative: str = "reverse"
    half: str = "bf16"
    islands: bool = True
    run: str = "compiled"

    @property
    def has_rows(self) -> bool:
        """Whether the program's result has a row for each iteration."""
        return self.stages[-1].handed == "rows"

    def parameters(self) -> dict[str, set[str]]:
        """Names of parameters, by stage."""
        made = {}
        for number, stage in enumerate(self.stages):
            made[f"s{number}"] = set(BODIES[stage.body].params)
            if stage.drive != "as given":
                made[f"s{number}"].add("w")
        return made

    def source(self) -> str:
        """The program as Python."""
        return "\n".join(_source(self))


def _source(made: Composition) -> Iterator[str]:
    yield "def program(C, p, x, rows, target):"
    inner = "\n".join(itertools.chain.from_iterable(_parts(made)))
    yield from (f"    {line}" if line else line for line in inner.splitlines())
    for name in made.outer:
        yield f"program = {AROUND_PROGRAM[name].format(f='program')}"


def _parts(made: Composition) -> Iterator[list[str]]:
    rows = "x"
    for number, stage in enumerate(made.stages):
        yield _stage(stage, number, made.length)
        yield [f'h{number}, y{number} = stage{number}(p["s{number}"], {rows}, rows)']
        final = BODIES[stage.body].final.format(n=made.length, d=stage.decay)
        yield [f"z{number} = (lambda h: {final})(h{number})"]
        rows = f"rms(y{number})"
    last = len(made.stages) - 1
    read = rows if made.has_rows else f"rms(z{last})"
    yield [
        f'out = C.mm({read}, p["o"])',
        "loss = jnp.mean((out - target) ** 2)",
        f"return loss, {{'out': out, {', '.join(f'{n!r}: {n}' for n in _states(made))}}}",
    ]


def _states(made: Composition) -> list[str]:
    return [f"z{number}" for number in range(len(made.stages))]


def _stage(stage: Stage, number: int, length: int) -> list[str]:
    body = BODIES[stage.body]
    act = "C.act" if stage.is_activation(length) else ""

    def text(of: str) -> str:
        return of.replace("ACT", act).replace("{d}", str(stage.decay)).replace("{n}", str(length))

    lines = [f"def init{number}(u):", f"    return {text(body.init)}"]
    lines += [f"def step{number}(q, h, t):", f"    u = {DRIVES[stage.drive]}"]
    lines += [f"    {line}" for line in text(body.lines).splitlines()]
    lines += ["    return C.carry(h), y"]
    step, init, back = f"step{number}", f"init{number}(u[0])", "h"
    for name in stage.step:
        lines.append(f"{step} = {AROUND_STEP[name].format(f=step)}")
        if name in VMAPS:
            axis = 1 if "all" in name else 0
            init = f"jax.vmap(init{number}, out_axes={axis})(u[0])"
            back = f"jax.tree.map(lambda a: jnp.moveaxis(a, {axis}, {body.batch}), h)"
    lines += [f"def stage{number}(q, u, rows):"]
    if stage.drive == "outside":
        lines += ['    u = C.mm(u, q["w"])']
    weights = ', "W": q["W"]' if "W" in body.params else ""
    call = {
        "scan": "by_scan({0})",
        "reversed": "by_scan({0}, reverse=True)",
        "unrolled": "by_scan({0}, unroll=3)",
        "two scans": f"by_two_scans({{0}}, {divisor(length)})",
        "fori": "by_fori({0})",
        "while": "by_while({0})",
    }[stage.loop].format(f'{step}, q, {init}, {{"u": u, **rows{weights}}}')
    lines += [f"    h, y = {call}", f"    return {back}, y"]
    for name in stage.whole:
        around = AROUND_STAGE[name].format(f=f"stage{number}", batch=body.batch)
        lines.append(f"stage{number} = {around}")
    return lines


def divisor(length: int) -> int:
    """Return the largest divisor of a length that is not above its root."""
    return max(n for n in range(1, int(length**0.5) + 1) if length % n == 0)


# At random.


def composition(seed: int, attempt: int = 0) -> Composition:
    """Make a composed program.

    Args:
        seed: From which it is made.
        attempt: How many programs of this seed have been thrown away.
    """
    pick = random.Random(f"{seed} {attempt}")
    derivative = pick.choices(list(DERIVATIVES), list(DERIVATIVES.values()))[0]
    vmapped = pick.random() < 0.1
    stages = tuple(
        _random_stage(pick, derivative, vmapped=vmapped)
        for _ in range(1 if pick.random() < 0.85 else 2)
    )
    longest = min(BODIES[stage.body].longest for stage in stages)
    # Evenly by its logarithm: the errors of state grow with the number of iterations.
    length = round(3 * (longest / 3) ** pick.random())
    if length > 8:
        length -= length % 4
    names = list(AROUND_PROGRAM)[:-1]
    outer = [pick.choice(names)] if pick.random() < 0.3 else []
    if vmapped:
        outer.insert(pick.randint(0, len(outer)), "vmap")
    return Composition(
        seed,
        stages,
        length,
        tuple(outer),
        derivative,
        pick.choice(["bf16", "bf16", "f16"]),
        islands=pick.random() < 0.8,
        run=pick.choices(["in NumPy", "compiled", "eager"], [8 if length <= SHORT else 0, 2, 0.2])[
            0
        ],
    )


def _random_stage(pick: random.Random, derivative: str, *, vmapped: bool) -> Stage:
    name = pick.choice(list(BODIES))
    body = BODIES[name]
    loops = LOOPS if derivative in ("forward", "none") else LOOPS[:-1]
    weights = [6, 1, 1, 2, 2, 3][: len(loops)]

    def allowed(around: str) -> bool:
        if around.startswith("custom_vjp"):
            return derivative not in ("forward", "over reverse")
        return not (body.has_scalars and "all" in around)

    step = _some(pick, [n for n in AROUND_STEP if n not in VMAPS and allowed(n)], 0.45)
    whole = _some(pick, [n for n in AROUND_STAGE if "vmap" not in n and allowed(n)], 0.25)
    where = pick.random()
    if not vmapped and where < 0.25:
        step.insert(pick.randint(0, len(step)), pick.choice([n for n in VMAPS if allowed(n)]))
    elif not vmapped and where < 0.4:
        vmap = pick.choice([n for n in AROUND_STAGE if "vmap" in n])
        whole.insert(pick.randint(0, len(whole)), vmap)
    return Stage(
        name,
        pick.choices(loops, weights)[0],
        # Sums of positive numbers stall, which is how state in 16 bits goes wrong most.
        pick.choices(list(DRIVES), [1, 1, 1, 1, 1, 3, 2])[0],
        pick.choice([0.5, 0.9, 0.99, 0.99, 0.999]),
        tuple(step),
        tuple(whole),
        pick.choice(["rows", "final"]),
    )


def _some(pick: random.Random, names: list[str], chance: float) -> list[str]:
    """One name or two, or none."""
    made: list[str] = []
    while len(made) < 2 and pick.random() < chance:
        made.append(pick.choice(names))
    return made


# Smaller.


def smaller(made: Composition) -> Iterator[Composition]:
    """Compositions with one part less, those that lose most first."""
    for number, stage in enumerate(made.stages):
        if len(made.stages) > 1:
            rest = made.stages[:number] + made.stages[number + 1 :]
            yield dataclasses.replace(made, stages=rest)
        for simpler in _smaller_stages(stage):
            stages = (*made.stages[:number], simpler, *made.stages[number + 1 :])
            yield dataclasses.replace(made, stages=stages)
    for place in range(len(made.outer)):
        yield dataclasses.replace(made, outer=made.outer[:place] + made.outer[place + 1 :])
    for length in (made.length // 4, made.length // 2, made.length * 3 // 4):
        if length >= 3:
            yield dataclasses.replace(made, length=length)
    plain = {"islands": True, "half": "bf16"}
    for name, value in plain.items():
        if getattr(made, name) != value:
            yield dataclasses.replace(made, **{name: value})
    if made.derivative != "none":
        yield dataclasses.replace(made, derivative="none")
        if made.derivative != "reverse" and "while" not in {stage.loop for stage in made.stages}:
            yield dataclasses.replace(made, derivative="reverse")


def _smaller_stages(stage: Stage) -> Iterator[Stage]:
    for field in ("step", "whole"):
        names: tuple[str, ...] = getattr(stage, field)
        for place in range(len(names)):
            yield dataclasses.replace(stage, **{field: names[:place] + names[place + 1 :]})
    for field, value in {"loop": "scan", "drive": "inside", "handed": "rows"}.items():
        if getattr(stage, field) != value:
            yield dataclasses.replace(stage, **{field: value})


def shrunk_composition(
    made: Composition, fails: Callable[[Composition], bool], tries: int = 40
) -> Composition:
    """Return the smallest composition that was found to fail.

    Args:
        made: One that fails.
        fails: Whether another one does.
        tries: How many others are tried.
    """
    seen = {made}
    while True:
        for candidate in smaller(made):
            if candidate in seen:
                continue
            if len(seen) > tries:
                return made
            seen.add(candidate)
            if fails(candidate):
                made = candidate
                break
        else:
            return made
