"""In programs compiled for accelerators, too, all readers of a value read one rounding of it."""

import re

import jax
import jax.numpy as jnp
import pytest

import halfstep
from halfstep._base import rounding as _settle
from tests._rows import slow_unless


def loose_readers(program: str) -> list[str]:
    """Who reads a sum of the scope `loose` before it is rounded, in a compiled program."""
    found = []
    for computation in re.split(r"\n(?=\S)", program):
        lines = re.findall(r"^\s+(?:ROOT )?%([\w.\-]+) = (\S+) ([\w\-]+)\((.*)$", computation, re.M)
        sums = {
            name
            for name, kind, op, rest in lines
            if op == "add" and kind.startswith("f32") and "loose/add" in rest
        }
        for name, kind, op, rest in lines:
            operands = set(re.findall(r"%([\w.\-]+)", rest.split(")")[0]))
            is_rounding = op == "reduce-precision" or (op == "convert" and kind.startswith("bf16"))
            widens = op == "convert" and kind.startswith("f32")
            if sums & operands and widens:
                sums.add(name)
            elif sums & operands and not is_rounding:
                found.append(f"{op} {name}")
    return found


def softened(w, x):
    with jax.named_scope("loose"):
        h = x @ w + w[:1]
    probabilities = jnp.exp(h - jnp.max(h, axis=-1, keepdims=True))
    return h * 0.5 + w[1:2], probabilities, jnp.sum(h * h), h


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "target",
    slow_unless(["h100", "rtx4090", "a100-80gb", "v5e"], lambda name: name in ("rtx4090", "v5e")),
)
def test_compiled_for_accelerators_all_readers_read_one_rounding(target: str):
    shapes = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((512, 512), "f4")

    def readers() -> list[str]:
        step = jax.jit(lambda *args: halfstep.autocast(softened, "bf16")(*args))
        (entry,) = halfstep.preflight(step, shapes, targets=target, progress=False).entries
        assert "loose/add" in entry.hlo
        return loose_readers(entry.hlo)

    assert readers() == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_settle._settle, "bind", lambda value, **_: value)
        # An H100 adds in bfloat16 itself: there, nothing is lost either way.
        assert (readers() == []) == (target == "h100")
