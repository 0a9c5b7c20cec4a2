"""A site: one value of a program whose numbers are recorded."""

import dataclasses
from typing import Any, Literal as OneOf

from halfstep._explain import Typed
from halfstep._program import Source

Pass = OneOf["forward", "backward", "update"]
"""Of a training step: the loss, its derivative, and what is made of that."""


@dataclasses.dataclass(frozen=True)
class Site:
    """One value of a program: what makes it, and where that is written.

    Attributes:
        op: JAX's name of the primitive that makes it; `"argument"` for what the function is given.
        source: The line of the user's code: `file`, `line`, `function`. Of the backward pass, the
            line whose derivative it is.
        scope: The `jax.named_scope`s that it is in, with `/` between them.
        stage: `"forward"`, `"backward"`, or `"update"`: what comes after the gradients.
        recomputed: Whether it is of the forward pass, computed once more for the backward pass.
        within: The loops, branches and calls that it is in, outermost first: `("scan x12",)`.
        loops: Which of them are loops, and so have turns.
        type: Dtype and shape of the value, in one turn and on one shard.
        path: Of an argument, its path: `"batch/image"`.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def is_exp(site: halfstep.debug.Site) -> bool:
            return site.op == "exp" and site.scope == "head"


        def step(x):
            with jax.named_scope("head"):
                return jnp.exp(x) + 1


        recorder = halfstep.debug.record(step, sites=is_exp)
        (site,) = recorder.init(jnp.ones(3)).sites
        assert site.scope == "head" and str(site.type) == "f32[3]"
        ```
    """

    op: str
    source: Source
    scope: str
    stage: Pass
    recomputed: bool
    within: tuple[str, ...]
    loops: tuple[str, ...]
    type: Typed
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"{self.path} {self.type}"
        return f"{self.op} {self.type} at {self.source}"

    @property
    def pass_name(self) -> str:
        """`"forward"`, `"backward"`, `"backward (recomputed)"` or `"update"`."""
        return f"{self.stage} (recomputed)" if self.recomputed else self.stage

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "op": self.op,
            "file": self.source.file,
            "line": self.source.line,
            "function": self.source.function,
            "scope": self.scope,
            "pass": self.pass_name,
            "within": list(self.within),
            "dtype": self.type.dtype,
            "shape": list(self.type.shape),
            "path": self.path,
        }
