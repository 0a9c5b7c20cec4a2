"""List every carry of a loop with its precision, and what decided about it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from halfstep._autocast import held_dtype
from halfstep._explain.entries import Typed, typed
from halfstep._explain.places import PlanPlace
from halfstep._program import Finder, Scan, Source, While


@dataclasses.dataclass(frozen=True)
class ExplainCarry:
    """A floating-point value that a loop hands from one iteration to the next.

    Attributes:
        name: Its name in the function that runs in each iteration, as far as JAX says.
        loop: The loop: `"scan x2048"`, `"while"`.
        function: The name of that function, by which a rule names the loop.
        source: Where the loop is written.
        scope: The named scopes that it is in.
        type: The type in which all iterations take it.
        reading: `"state"` (stays float32, and is never rounded), `"activation"` (follows what an
            iteration makes of it), or `"neither"` (does not depend on itself).
        reason: Why it is read like this.
        by: The policy's rule that has decided, if one has.
        rule: The rule that reads it the other way.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def average(decay, x):
            def step(mean, new):
                return decay * mean + (1 - decay) * new, None

            return jax.lax.scan(step, jnp.zeros(4), x)[0]


        report = halfstep.explain(average, "bf16")(jnp.full(4, 0.999), jnp.ones((2048, 4)))
        (carry,) = report.carries
        assert (carry.name, carry.reading, carry.type.dtype) == ("mean", "state", "f32")
        assert carry.rule == "loop:step=activation"
        ```
    """

    name: str
    loop: str
    function: str
    source: Source
    scope: str
    type: Typed
    reading: str
    reason: str
    by: str
    rule: str

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "source": str(self.source),
            "type": str(self.type),
        }


def carry_rows(place: PlanPlace, finder: Finder) -> Iterator[ExplainCarry]:
    """List the carries of all loops of a plan, and of the plans inside it."""
    plan = place.plan
    for index, node in enumerate(plan.graph.nodes):
        if not place.holds_functions(index):
            continue
        inner = place.inside(index)
        loop = node.structure
        if isinstance(loop, Scan | While):
            body = inner[-1].plan
            function, first = loop.name, loop.inner()[-1].carried.start
            for carry in plan.decisions[index].carries:
                number = body.graph.inputs[first + carry.number]
                aval = body.graph.avals[number]
                held = held_dtype(aval, body.kinds[number], plan.settings.compute)
                other = "activation" if carry.is_state else "state"
                yield ExplainCarry(
                    carry.name,
                    inner[-1].labels[-1],
                    function,
                    finder.find(node.source.traceback),
                    node.scope,
                    typed(aval, held),
                    carry.reading,
                    carry.reason,
                    carry.by,
                    f"loop:{function}={other}",
                )
        for one in inner:
            yield from carry_rows(one, finder)
