"""Makes random programs, all of whose operations have operands of shapes and dtypes that fit."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tests.fuzz import _tables as tables
from tests.fuzz._program import Program, Statement, is_float, is_key, shapes_of

_Aval = jax.ShapeDtypeStruct
_LARGEST = 300
_FLOAT32, _INT32, _BOOL = (np.dtype(name) for name in ("float32", "int32", "bool"))


def _array(*shape: int, dtype: Any = _FLOAT32) -> _Aval:
    return _Aval(shape, dtype)


def random_program(seed: int) -> tuple[Program, int]:
    """A program, and how many of its arguments are parameters."""
    choice = random.Random(seed)
    size = choice.choice((3, 4, 4, 5))

    def shape(least: int, most: int) -> tuple[int, ...]:
        return tuple(choice.choice((1, 2, 3, 4, 5)) for _ in range(choice.randint(least, most)))

    parameters = [
        _array(*choice.choice(((size, size), shape(1, 3), (size,), shape(0, 2))))
        for _ in range(choice.randint(1, 4))
    ]
    data = [
        _array(*choice.choice(((2, size), shape(0, 3), (size, size))))
        for _ in range(choice.randint(1, 2))
    ]
    others = [_array(choice.choice((1, 2, 3)), dtype=_INT32), _array(dtype=_BOOL)]
    for probability, dtype in ((0.3, "bfloat16"), (0.15, "float16"), (0.3, "uint8")):
        if choice.random() < probability:
            others.append(_array(*shape(1, 2), dtype=jax.numpy.dtype(dtype)))
    if choice.random() < 0.1:
        others.append(_array(0, 3))
    others.append(_array(dtype=jax.eval_shape(lambda: jax.random.key(0)).dtype))
    maker = _Maker(choice, Program((*parameters, *data, *others)), choice.choice((1, 1, 2, 3)))
    maker.grow(choice.choice((5, 6, 8, 8, 10, 12, 16, 24)))
    program = maker.program
    made = range(len(program.arguments), len(program.values()))
    chosen = choice.sample(made, min(len(made), choice.randint(1, 4)))
    floats = [number for number in made if program.values()[number].dtype == _FLOAT32]
    program.returned = [*chosen, *floats[-1:]]
    return program, len(parameters)


class _Maker:
    """One function that grows, statement by statement."""

    def __init__(
        self, choice: random.Random, program: Program, depth: int, *, mapped: bool = False
    ) -> None:
        self.choice, self.program, self.depth, self.mapped = choice, program, depth, mapped
        self.values = program.values()

    def grow(self, count: int) -> None:
        """Add about so many statements, those of inner functions included."""
        for _ in range(6 * count + 10):
            if self.program.size() >= count:
                return
            structured = self.depth > 0 and self.choice.random() < 0.3
            self.structure() if structured else self.operation()

    def add(self, text: str, operands: Sequence[int | None], inner: Sequence[Program] = ()) -> bool:
        """Add a statement, unless JAX itself refuses it, or it makes something large."""
        numbers = tuple(number for number in operands if number is not None)
        if len(numbers) < len(operands):
            return False
        try:
            made = shapes_of(text, [self.values[number] for number in numbers], inner)
        except (TypeError, ValueError, IndexError, ZeroDivisionError, NotImplementedError):
            return False
        flat = jax.tree.leaves(made)
        if any(math.prod(aval.shape) > _LARGEST or len(aval.shape) > 5 for aval in flat):
            return False
        if any(str(aval.dtype) in ("complex64", "float64", "int64") for aval in flat):
            return False
        results = tuple(_Aval(aval.shape, aval.dtype) for aval in flat)
        self.program.statements.append(
            Statement(text, numbers, results, tuple(inner), isinstance(made, tuple | list))
        )
        self.values.extend(results)
        return True

    def pick(self, accept: Callable[[_Aval], bool]) -> int | None:
        """One of the values so far, rather a late one."""
        found = [number for number, aval in enumerate(self.values) if accept(aval)]
        if len(found) > 3 and self.choice.random() < 0.6:
            found = found[-4:]
        return self.choice.choice(found) if found else None

    def operand(self, kind: str) -> int | None:
        """A value of one of the kinds that the tables name."""
        least = int(kind[1:] or 0)
        narrow = self.choice.random() < 0.25

        def accept(aval: _Aval) -> bool:
            if 0 in aval.shape or len(aval.shape) < least or len(aval.shape) > max(4, least):
                return False
            match kind[0]:
                case "x":
                    return is_float(aval) if narrow else aval.dtype == _FLOAT32
                case "w":
                    return aval.dtype == _FLOAT32
                case "m":
                    return aval.dtype == _FLOAT32 and len(aval.shape) == 2
                case "i":
                    return str(aval.dtype) in ("int32", "uint8")
                case "b":
                    return aval.dtype == _BOOL
                case "k":
                    return is_key(aval) and not aval.shape
                case _:
                    return not is_key(aval) and aval.dtype != np.uint32

        return self.pick(accept)

    def operation(self) -> bool:
        """Add an operation of the tables."""
        kinds, texts = self.choice.choice(tables.OPERATIONS)
        operands = [self.operand(kind) for kind in kinds.split()]
        text = self.choice.choice(texts)
        if callable(text):
            known = [None if number is None else self.values[number] for number in operands]
            if None in known:
                return False
            text = text(self.choice, *known)
        return text is not None and self.add(text, operands)

    def structure(self) -> bool:
        """Add a loop, a branch, a call or a map with a random function inside."""
        return self.choice.choice(_STRUCTURES)(self)

    def inner(
        self, arguments: Sequence[_Aval], wanted: Sequence[_Aval] | None = None, **options: Any
    ) -> Program:
        """A function of such arguments, with results like those wanted, or any."""
        options.setdefault("mapped", self.mapped)
        program = Program(tuple(_Aval(aval.shape, aval.dtype) for aval in arguments))
        maker = _Maker(self.choice, program, self.depth - 1, **options)
        maker.grow(self.choice.choice((1, 2, 2, 3, 4)))
        if wanted is None:
            made = list(range(len(arguments), len(maker.values))) or [0]
            program.returned = [
                self.choice.choice(made) for _ in range(self.choice.choice((1, 1, 2)))
            ]
        else:
            program.returned = [maker.like(aval) for aval in wanted]
        return program

    def like(self, wanted: _Aval) -> int:
        """A value of a shape and dtype, made to fit if there is none."""
        fitting = [
            number
            for number, aval in enumerate(self.values)
            if aval.shape == wanted.shape and aval.dtype == wanted.dtype
        ]
        made = [number for number in fitting if number >= len(self.program.arguments)]
        if is_key(wanted) or (made and self.choice.random() < 0.7):
            return self.choice.choice(made or fitting)
        number = self.pick(lambda aval: not is_key(aval) and is_float(aval) == is_float(wanted))
        if number is None:
            number = self.pick(lambda aval: not is_key(aval)) or 0
        # A constant of JAX may be weak; what a loop carries is not.
        self.add(f"fit({{0}}, {wanted.shape}, '{wanted.dtype}')", [number])
        return len(self.values) - 1

    def some(self, count: int, accept: Callable[[_Aval], bool] | None = None) -> list[int]:
        """Some values, for a function inside."""
        usual = accept or (lambda aval: not (is_key(aval) and aval.shape))
        found = [self.pick(usual) for _ in range(count)]
        return [number for number in found if number is not None]

    def avals(self, numbers: Sequence[int]) -> list[_Aval]:
        """What values are."""
        return [self.values[number] for number in numbers]


def _given(count: int, start: int = 0) -> str:
    return ", ".join(f"{{{number}}}" for number in range(start, start + count))


def _call(maker: _Maker) -> bool:
    operands = maker.some(maker.choice.choice((1, 2, 3)), lambda a: not is_key(a))
    if not operands:
        return False
    inner = maker.inner(maker.avals(operands))
    how = maker.choice.choice(tables.CALLS)
    return maker.add(f"{how}({_given(len(operands))})", operands, [inner])


def _scan(maker: _Maker) -> bool:
    choice = maker.choice
    carries, fixed = maker.some(choice.choice((1, 1, 2))), maker.some(1)
    length = choice.choice((1, 2, 3))

    def sliced(aval: _Aval) -> bool:
        return not is_key(aval) and aval.shape[:1] == (length,)

    xs = maker.some(choice.choice((0, 1, 2)), sliced)
    slices = [_Aval(aval.shape[1:], aval.dtype) for aval in maker.avals(xs)]
    like = maker.avals(carries)
    inner = maker.inner([*like, *maker.avals(fixed), *slices], like)
    if choice.random() < 0.5:
        values = inner.values()
        inner.returned += [
            number for number in (choice.randrange(len(values)),) if not is_key(values[number])
        ]
    first, second = len(carries), len(carries) + len(fixed)
    body = (
        f"lambda c, x: (lambda r: (r[:{first}], r[{first}:]))"
        f"({{f}}(*c, {_given(len(fixed), first)}, *x))"
    )
    inputs = f"({_given(len(xs), second)}{',' if xs else ''})"
    options = f"length={length}, reverse={choice.random() < 0.3}"
    options += f", unroll={choice.choice(('1', '1', '2', 'True'))}"
    # Carries are returned as a tuple, and what is stacked as another: both become one.
    text = f"(lambda r: (*r[0], *r[1]))(lax.scan({body}, ({_given(first)},), {inputs}, {options}))"
    return maker.add(text, [*carries, *fixed, *xs], [inner])


def _for(maker: _Maker) -> bool:
    carries, fixed = maker.some(maker.choice.choice((1, 2))), maker.some(1)
    like = maker.avals(carries)
    inner = maker.inner([_array(dtype=_INT32), *like, *maker.avals(fixed)], like)
    count = len(carries)
    body = f"lambda i, c: {{f}}(i, *c, {_given(len(fixed), count)})"
    turns = maker.choice.choice((1, 2, 3))
    text = f"lax.fori_loop(0, {turns}, {body}, ({_given(count)},))"
    return maker.add(text, [*carries, *fixed], [inner])


def _while(maker: _Maker) -> bool:
    carries, fixed = maker.some(maker.choice.choice((1, 2))), maker.some(1)
    like = maker.avals(carries)
    inner = maker.inner([_array(dtype=_INT32), *like, *maker.avals(fixed)], like)
    count = len(carries)
    stopped = ", ".join(f"lax.stop_gradient({{{number}}})" for number in range(count))
    test = "s[0] < 3"
    if is_float(like[0]) and maker.choice.random() < 0.4:
        test = "(s[0] < 3) & (jnp.sum(jnp.abs(s[1]).astype(jnp.float32)) < 1e3)"
    rest = ", ".join(
        f"lax.stop_gradient({{{number}}})" for number in range(count, count + len(fixed))
    )
    body = f"lambda s: (s[0] + 1, *{{f}}(s[0], *s[1:], {rest}))"
    return maker.add(
        f"lax.while_loop(lambda s: {test}, {body}, (jnp.int32(0), {stopped}))",
        [*carries, *fixed],
        [inner],
    )


def _branch(maker: _Maker) -> bool:
    operands = maker.some(maker.choice.choice((1, 2, 3)))
    first = maker.inner(maker.avals(operands))
    values = first.values()
    wanted = [values[number] for number in first.returned]
    if any(map(is_key, wanted)):
        return False
    second = maker.inner(maker.avals(operands), wanted)
    # The first one's results may be weakly typed; a branch's may not, unless both are.
    maker_of_first = _Maker(maker.choice, first, 0)
    for place, aval in enumerate(wanted):
        maker_of_first.add(f"fit({{0}}, {aval.shape}, '{aval.dtype}')", [first.returned[place]])
        first.returned[place] = len(maker_of_first.values) - 1
    given = _given(len(operands), 1)
    if maker.choice.random() < 0.5:
        chosen = maker.operand("b")
        return maker.add(
            f"lax.cond(jnp.all({{0}}), {{f}}, {{g}}, {given})", [chosen, *operands], [first, second]
        )
    chosen = maker.operand("i")
    return maker.add(
        f"lax.switch(jnp.max({{0}}).astype(jnp.int32), [{{f}}, {{g}}, {{f}}], {given})",
        [chosen, *operands],
        [first, second],
    )


def _vmap(maker: _Maker) -> bool:
    choice = maker.choice
    first = maker.operand("x1")
    if first is None:
        return False
    shape = maker.values[first].shape
    axis = choice.randrange(len(shape))
    operands, inside = [first], [_without(maker.values[first], axis)]
    axes: list[int | None] = [axis]
    for number in maker.some(choice.choice((1, 2))):
        aval = maker.values[number]
        places = [i for i, size in enumerate(aval.shape) if size == shape[axis]]
        operands.append(number)
        if places and not is_key(aval) and choice.random() < 0.6:
            place = choice.choice(places)
            axes.append(place)
            inside.append(_without(aval, place))
        else:
            axes.append(None)
            inside.append(aval)
    inner = maker.inner(inside)
    how = f"jax.vmap({{f}}, in_axes={tuple(axes)}, out_axes={choice.choice((0, 0, -1))})"
    return maker.add(f"{how}({_given(len(operands))})", operands, [inner])


def _without(aval: _Aval, axis: int) -> _Aval:
    return _Aval(aval.shape[:axis] + aval.shape[axis + 1 :], aval.dtype)


def _map(maker: _Maker) -> bool:
    first, fixed = maker.operand("x1"), maker.some(1)
    if first is None:
        return False
    inner = maker.inner([_without(maker.values[first], 0), *maker.avals(fixed)])
    size = maker.choice.choice(("None", "2"))
    text = f"lax.map(lambda x: {{f}}(x, {_given(len(fixed), 1)}), {{0}}, batch_size={size})"
    return maker.add(text, [first, *fixed], [inner])


def _derivative(maker: _Maker) -> bool:
    first = maker.operand("w1")
    rest = maker.some(1, lambda aval: not is_key(aval))
    if first is None:
        return False
    inner = maker.inner(maker.avals([first, *rest]), maker.avals([first]))
    text = maker.choice.choice(tables.DERIVATIVES)
    return maker.add(text.replace("GIVEN", _given(len(rest), 1)), [first, *rest], [inner])


def _derivative_of_each(maker: _Maker) -> bool:
    first = maker.operand("w2")
    if first is None:
        return False
    inner = maker.inner([_without(maker.values[first], 0)], [_array()])
    return maker.add("jax.vmap(jax.grad(half_sum({f})))({0})", [first], [inner])


def _shard_map(maker: _Maker) -> bool:
    first = maker.operand("w1")
    if first is None or maker.mapped:
        return False
    aval, fixed = maker.values[first], maker.some(1, lambda aval: not is_key(aval))
    inner = maker.inner([aval, *maker.avals(fixed)], [aval], mapped=True)
    names = maker.choice.choice(tables.MESHES)
    after = maker.choice.choice(tables.COLLECTIVES).replace("AXIS", repr(names[0]))
    body = f"lambda x, *c: {after.replace('VALUE', '{f}(x[0], *c)[0]')}[None]"
    # The first dimension is divided over all axes.
    spec = f"P({names})"
    stacked = "jnp.stack([{0} * (0.5 + 0.25 * i) for i in range(4)])"
    # The mesh is made when the program runs: devices are the process's, and not the text's.
    text = (
        f"jax.shard_map({body}, mesh=mesh{names}, in_specs=({spec}, *[P()] * {len(fixed)}), "
        f"out_specs={spec}, check_vma={maker.choice.random() < 0.7})"
        f"({stacked}, {_given(len(fixed), 1)})"
    )
    return maker.add(text, [first, *fixed], [inner])


_STRUCTURES: Sequence[Callable[[_Maker], bool]] = (
    _call,
    _call,
    _call,
    _call,
    _scan,
    _scan,
    _for,
    _while,
    _branch,
    _branch,
    _vmap,
    _vmap,
    _map,
    _derivative,
    _derivative_of_each,
    _shard_map,
)


def random_values(program: Program, seed: int) -> list[Any]:
    """Numbers to call a program with."""
    random_state = np.random.RandomState(seed)
    made: list[Any] = []
    for aval in program.arguments:
        if is_key(aval):
            made.append(jax.random.key(seed % 1000))
        elif is_float(aval):
            made.append(jax.numpy.asarray(random_state.randn(*aval.shape), aval.dtype))
        elif aval.dtype == _BOOL:
            made.append(jax.numpy.asarray(random_state.rand(*aval.shape) > 0.5))
        else:
            made.append(jax.numpy.asarray(random_state.randint(0, 3, aval.shape), aval.dtype))
    return made
