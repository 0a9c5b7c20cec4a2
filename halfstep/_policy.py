"""What a precision policy is, and how it is written."""

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import numpy as np

from halfstep._cast import cast_tree
from halfstep._formats import DTypeLike, dtype_name, parse_dtype
from halfstep._paths import compile_rule

T = TypeVar("T")

_KEYS = MappingProxyType(
    {
        "p": "param",
        "params": "param",
        "param": "param",
        "c": "compute",
        "compute": "compute",
        "o": "output",
        "output": "output",
    }
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Policy:
    """Which precision is used where. Immutable and hashable; holds no arrays.

    Attributes:
        param: Dtype in which parameters are stored.
        compute: Dtype in which floating-point arguments enter the computation.
        output: Dtype of the results, for `cast_to_output`.
        keep: Path rules for arguments that are not cast.

    Example:
        ```python
        from halfstep import Policy

        policy = Policy.parse("bf16")
        assert policy == Policy(param="f32", compute="bf16", output="f32")
        assert str(policy) == "p=f32,c=bf16,o=f32"
        assert Policy.parse(str(policy)) == policy
        ```
    """

    param: np.dtype
    compute: np.dtype
    output: np.dtype
    keep: tuple[str, ...]

    def __init__(
        self,
        *,
        param: DTypeLike = "f32",
        compute: DTypeLike = "bf16",
        output: DTypeLike = "f32",
        keep: Sequence[str] = (),
    ):
        if isinstance(keep, str):
            raise TypeError(f"`keep` is a sequence of path rules; write keep=({keep!r},).")
        for rule in keep:
            compile_rule(rule)
        values = {
            "param": parse_dtype(param),
            "compute": parse_dtype(compute),
            "output": parse_dtype(output),
            "keep": tuple(keep),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @staticmethod
    def parse(text: str) -> "Policy":
        """Read a policy from text.

        Args:
            text: A short name (`"bf16"`, `"f16"`, `"f32"`: parameters and outputs in float32,
                computation in that format), or parts separated by commas as in
                `"p=f32,c=bf16,o=f32,keep=state"`. As in jmp, parameters default to float32,
                `c` follows `p` and `o` follows `c`.

        Raises:
            ValueError: If the text is no policy; the message says which part and what to write.
        """
        if "=" not in text:
            return Policy(param="f32", compute=text, output="f32")
        fields: dict[str, Any] = {}
        keep: list[str] = []
        for part in text.split(","):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key == "keep" and equals:
                keep.append(value)
            elif equals and key in _KEYS and _KEYS[key] not in fields:
                fields[_KEYS[key]] = parse_dtype(value)
            else:
                problem = "is given twice" if equals and key in _KEYS else "is not known"
                raise ValueError(
                    f"{part.strip()!r} in the policy {text!r} {problem}; required parts such as "
                    "'p=f32' (params), 'c=bf16' (compute), 'o=f32' (output), 'keep=state'."
                )
        param = fields.get("param", "f32")
        compute = fields.get("compute", param)
        return Policy(param=param, compute=compute, output=fields.get("output", compute), keep=keep)

    def __str__(self) -> str:
        parts = [
            f"{key}={dtype_name(dtype)}"
            for key, dtype in (("p", self.param), ("c", self.compute), ("o", self.output))
        ]
        return ",".join([*parts, *(f"keep={rule}" for rule in self.keep)])

    def __repr__(self) -> str:
        return f"Policy.parse({str(self)!r})"

    @property
    def casts_float64(self) -> bool:
        """Whether float64 leaves are cast: only a policy that stores parameters so says yes."""
        return self.param == np.dtype(np.float64)

    def cast_to_param(self, tree: T) -> T:
        """Cast a tree to the parameters' dtype."""
        return cast_tree(tree, self.param, float64=self.casts_float64)

    def cast_to_compute(self, tree: T) -> T:
        """Cast a tree to the compute dtype."""
        return cast_tree(tree, self.compute, float64=self.casts_float64)

    def cast_to_output(self, tree: T) -> T:
        """Cast a tree to the output dtype."""
        return cast_tree(tree, self.output, float64=self.casts_float64)

    def replace(self, **changes: Any) -> "Policy":
        """The same policy with some fields changed: `policy.replace(keep=("state",))`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        unknown = set(changes) - set(fields)
        if unknown:
            raise TypeError(
                f"a policy has no field {', '.join(sorted(unknown))}; it has {', '.join(fields)}."
            )
        return Policy(**{**fields, **changes})


def as_policy(policy: Any) -> Policy:
    """A policy from its text, or the policy itself."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return Policy.parse(policy)
    raise TypeError(
        f"a policy is a Policy or a text such as 'bf16' or 'p=f32,c=bf16,o=f32'; got {policy!r}."
    )
