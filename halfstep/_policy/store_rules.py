"""Define the user's rules for saved activations: what is kept for the backward pass, and how."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Literal as OneOf, get_args

from halfstep._base import check_fields, checked
from halfstep._policy.rules import Operation, check_place, is_at

StoreOutcome = OneOf["keep", "e4m3", "e5m2", "int4", "recompute", "offload"]
OUTCOMES: tuple[str, ...] = get_args(StoreOutcome)
_PREFIX = "store:"


@dataclasses.dataclass(frozen=True)
class StoreRule:
    """How the results of some operations are kept for the backward pass.

    The first matching rule of a policy wins. `"keep"` and `"recompute"` change single choices, and
    everything else stays as it is by default. If a rule asks for fewer bits or for the host, or is
    for all operations, results of contractions are kept unless a rule says otherwise, and
    everything else is recomputed. Inside the user's own `jax.checkpoint`, results are kept as its
    policy says unless a rule says otherwise.

    Attributes:
        outcome: `"keep"` (as they are, in 16 bits for most), `"e4m3"` or `"e5m2"` (in 8 bits, with
            a scale for each row), `"int4"` (in 4 bits, with a step and an offset for each block of
            16), `"recompute"` (not at all), or `"offload"` (as they are, in the host's memory).
        op: Which primitives, by name; `*` and `?` may be used. `None` means those whose results
            would be kept without the rule: contractions, kernels and values with a
            `checkpoint_name`, or what the policy of the user's `jax.checkpoint` saves.
        scope: Which `jax.named_scope`s, in the grammar of path rules. `None` means all.
        line: Which line of the user's code: `"model.py:12"`. The rule also applies to operations in
            functions that the line calls. `None` means all.
        number: Which of the operations that match all of these, in the order in which a function is
            traced: 0 is the first one. A Python loop over layers makes one operation for each
            layer. Every function that is traced by itself, such as the body of a loop, has its own
            numbers. `None` means all.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def loss(params, x):
            with jax.named_scope("mlp"):
                hidden = jax.nn.gelu(x @ params["up"])
                return jnp.mean((hidden @ params["down"]) ** 2)


        rule = halfstep.StoreRule("e4m3", scope="mlp")
        assert rule == halfstep.StoreRule.parse("store:scope:mlp=e4m3")
        policy = halfstep.Policy(compute="bf16", stores=(rule,))
        assert str(policy) == "p=f32,c=bf16,o=f32,store:scope:mlp=e4m3"
        params = {"up": jnp.ones((64, 64)), "down": jnp.ones((64, 64))}
        grads = jax.grad(halfstep.autocast(loss, policy))(params, jnp.ones((32, 64)))
        ```
    """

    outcome: StoreOutcome
    op: str | None = None
    scope: str | None = None
    line: str | None = None
    number: int | None = None

    @property
    def is_for_all(self) -> bool:
        """Whether the rule matches every operation."""
        return self.op == "*" and self.scope is self.line is self.number is None

    def __post_init__(self) -> None:
        check_fields(self)
        _check_outcome(self.outcome)
        if self.op is None and self.scope is None and self.line is None:
            raise ValueError(
                f"a rule says what it is for; got {self.outcome!r} alone. Give op=, scope= or "
                "line=; op='*' is for every operation."
            )
        if self.line is not None and not re.fullmatch(r"[^,=@]+:\d+", self.line):
            raise ValueError(
                f"a line is written as a file and a number, 'model.py:12'; got {self.line!r}."
            )
        if self.number is not None and not (type(self.number) is int and self.number >= 0):
            raise ValueError(
                f"number= must be an integer, 0 for the first operation; got {self.number!r}."
            )
        if self.number is not None and self.op is None:
            raise ValueError(
                f"number= counts operations of a name; got number={self.number} without one. Give "
                "op=, as in 'store:op:dot_general@mlp#0=keep'."
            )
        check_place(self.op, self.scope)

    @staticmethod
    @checked
    def parse(text: str) -> "StoreRule":
        """Read a rule such as `"store:op:dot_general@mlp=e4m3"`; `store:` may be left out.

        Raises:
            ValueError: If the text is not a rule.
        """
        found = re.fullmatch(
            r"(?:store:)?(?P<place>(?:op|scope|line):[^=#]+)(?:#(?P<number>\d{1,9}))?=(?P<outcome>.+)",
            text.strip(),
        )
        first, *more = found["place"].split("@") if found else [""]
        # After an operation, a scope is written without its prefix.
        parts = [first, *(x if x.startswith("line:") else f"scope:{x}" for x in more)]
        place = dict(part.split(":", 1) for part in parts if part)
        if not found or len(place) < len(parts):
            raise ValueError(
                "a rule for saved activations is a text such as 'store:op:dot_general=e4m3', "
                "'store:scope:decoder/mlp=recompute', 'store:op:dot_general@mlp=offload', "
                "'store:line:model.py:12=int4' or 'store:op:add@line:model.py:12#0=keep'; got "
                f"{text!r}."
            )
        return StoreRule(
            _check_outcome(found["outcome"].strip()),
            op=place.get("op"),
            scope=place.get("scope"),
            line=place.get("line"),
            number=None if found["number"] is None else int(found["number"]),
        )

    def __str__(self) -> str:
        parts = []
        if self.op is not None:
            parts.append(f"op:{self.op}")
        if self.scope is not None:
            parts.append(self.scope if parts else f"scope:{self.scope}")
        if self.line is not None:
            parts.append(f"line:{self.line}")
        place = "@".join(parts)
        number = "" if self.number is None else f"#{self.number}"
        return f"{_PREFIX}{place}{number}={self.outcome}"

    def matches(self, operation: Operation, lines: Sequence[str]) -> bool:
        """Return whether the rule applies to the results of an operation, whatever its number.

        Args:
            operation: The operation that makes the results.
            lines: The line of the operation, and the lines of the calls that led there, with as
                much of the paths as is known.
        """
        if self.line is not None:
            end = f"/{self.line}"
            if not any(line == self.line or line.endswith(end) for line in lines):
                return False
        return is_at(operation, self.op, self.scope)


def _check_outcome(outcome: object) -> Any:
    if outcome not in OUTCOMES:
        raise ValueError(
            f"the outcome of a rule for saved activations is one of {', '.join(OUTCOMES)}; got "
            f"{outcome!r}."
        )
    return outcome
