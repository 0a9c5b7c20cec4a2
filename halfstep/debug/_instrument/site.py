"""A site: one value of a program whose numbers are recorded."""

import dataclasses
from typing import Any, Literal as OneOf

from halfstep._explain import Typed
from halfstep._program import Source

Pass = OneOf["forward", "backward", "update"]
"""The passes of a training step: the loss, its derivative, and the update computed from it."""


@dataclasses.dataclass(frozen=True)
class Site:
    """One value of a program: the operation that computes it, and its place in the code.

    Attributes:
        op: JAX's name of the primitive that computes it; `"argument"` for a function's argument.
        source: The line of the user's code: `file`, `line`, `function`. In the backward pass, the
            line that is differentiated.
        scope: The `jax.named_scope`s that it is in, with `/` between them.
        stage: `"forward"`, `"backward"`, or `"update"`: what comes after the gradients.
        recomputed: Whether it belongs to the forward pass and is recomputed in the backward pass.
        within: The loops, branches and calls that it is in, outermost first: `("scan x12",)`.
        loops: The entries of `within` that are loops.
        type: Dtype and shape of the value, in one iteration and on one shard.
        path: The path of an argument, such as `"batch/image"`.

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
        """Return everything as plain values."""
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
