"""Run some operations of a traced function again."""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend import core, source_info_util

from halfstep._base import ClosedJaxpr
from halfstep._program.control_flow import bind_again


class Excerpt:
    """Operations of a traced function that run again, with their own lines and scopes."""

    def __init__(
        self,
        function: ClosedJaxpr,
        equations: Sequence[core.JaxprEqn],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        *,
        by: str = "",
    ) -> None:
        """Keep the operations that are needed.

        Args:
            function: The traced function.
            equations: Some of its operations.
            inputs: The variables that values are given for.
            outputs: The variables and constants to return.
            by: The transformation that the operations come from. Their scopes begin with it, and
                so do the scopes of the place where they are replayed.
        """
        self.constants = dict(zip(function.jaxpr.constvars, function.consts, strict=True))
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._outermost = source_info_util.new_name_stack().transform(by)
        needed = variables_of(outputs)
        live = []
        for equation in reversed(equations):
            if not needed.isdisjoint(equation.outvars):
                needed.update(variables_of(equation.invars))
                live.append(equation)
        self.equations = live[::-1]

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        env = {**self.constants, **dict(zip(self.inputs, values, strict=True))}

        def read(atom: Any) -> Any:
            return atom.val if is_literal(atom) else env[atom]

        here = source_info_util.current_name_stack()
        own = scopes = None
        for equation in self.equations:
            source = equation.source_info
            # Operations of one scope follow one another, and have the same object for a stack.
            if scopes is None or source.name_stack is not own:
                own = source.name_stack
                scopes = here + (own[1:] if own[:1] == self._outermost else own)
            with source_info_util.user_context(source.traceback, name_stack=scopes):
                made = bind_again(
                    equation.primitive, equation.params, list(map(read, equation.invars))
                )
            env.update(zip(equation.outvars, made, strict=True))
        return list(map(read, self.outputs))


def is_literal(atom: object) -> bool:
    """Return whether an operand is a number that is written into the program."""
    return isinstance(atom, core.Literal)


def variables_of(atoms: Iterable[Any]) -> set[Any]:
    """Return the operands other than literals: these cannot be hashed."""
    return {atom for atom in atoms if not is_literal(atom)}
