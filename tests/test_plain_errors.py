"""Errors for arguments of the wrong kind, as users see them: without the tests' type checker."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.core, pytest.mark.types]

# The class, a part of the message, and the call that raises it.
ROWS = [
    (
        "ValueError",
        "`gate` is 'loop', 'cond' or 'select'; got 'switch'",
        'gated(True, lambda s: s, 1, gate="switch")',
    ),
    (
        "ValueError",
        "`axis_reduction` is 'sum' or 'mean'; got 'max'",
        'hs.filter_grad(loss, axis_reduction="max")',
    ),
    (
        "ValueError",
        "`microbatch_reduction` is 'sum' or 'mean'; got 'max'",
        'hs.filter_grad(loss, microbatch_reduction="max")',
    ),
    (
        "TypeError",
        "`scaling` is a DynamicLossScaling, StaticLossScaling or NoLossScaling; got str",
        'hs.filter_grad(loss, "bf16")',
    ),
    (
        "TypeError",
        "a policy is a Policy or a text such as 'bf16'",
        "as_policy(jnp.float16)",
    ),
    (
        "TypeError",
        "`keep` is a sequence of path rules: write keep=('state',)",
        'hs.filter_grad(loss, keep="state")',
    ),
    (
        "TypeError",
        "`func` of `force_full_precision` must be a function or a module; got 3 (int)",
        "hs.force_full_precision(3)",
    ),
    (
        "TypeError",
        "`func` of `keep_precision` must be a function or a module; got 3 (int)",
        "hs.keep_precision(3)",
    ),
    (
        "TypeError",
        "`rules` of `Policy` must be a sequence, each a PrecisionRule or a text; got (3,) (tuple)",
        "hs.Policy(rules=(3,))",
    ),
    (
        "TypeError",
        "`rules` is a sequence of rules; write rules=('op:tanh=compute',)",
        'hs.Policy(rules="op:tanh=compute")',
    ),
    ("ValueError", "`mode` is 'autocast' or 'inputs'; got 'all'", 'hs.Policy(mode="all")'),
    (
        "ValueError",
        "a rule's outcome is one of compute, float32",
        'hs.PrecisionRule("bf16", op="tanh")',
    ),
    (
        "ValueError",
        "kind must be one of split16, split8, float32, stochastic; got 'split12'",
        'hs.optim.master(optax.sgd(0.1), "split12")',
    ),
    (
        "ValueError",
        "master_bits must be 24, 32, 'auto' or None, and not traced; got 16",
        "hs.optim.flash_adamw(1e-3, master_bits=16)",
    ),
    (
        "ValueError",
        "moment_bits must be 8, 4 or 'auto', and not traced; got 5",
        "hs.optim.flash_adamw(1e-3, moment_bits=5)",
    ),
    (
        "ValueError",
        "rounding must be 'nearest' or 'stochastic'; got 'up'",
        'hs.optim.flash_lion(1e-3, rounding="up")',
    ),
    (
        "ValueError",
        "scale_dtype must be bfloat16 or float32; got float16",
        'hs.optim.flash_sgd(1e-3, scale_dtype="float16")',
    ),
    (
        "TypeError",
        "`keep` is a sequence of path rules; write keep=('state',)",
        'hs.Policy(keep="state")',
    ),
    (
        "ValueError",
        "`residuals` is 'e4m3', 'e5m2' or None; got 'e3m4'",
        'hs.Policy(residuals="e3m4")',
    ),
    (
        "TypeError",
        "a policy has no field comptue; use one of param, compute",
        'hs.Policy().replace(comptue="bf16")',
    ),
    (
        "ValueError",
        "a path rule cannot contain a comma; got 'a,b'. Write '?' in its place",
        'hs.cast_tree({"a": w}, "bf16", keep=("a,b",))',
    ),
    (
        "PreflightError",
        'gemm must be "auto", "triton" or "library"; got \'fast\'',
        'hs.preflight(loss, (w, x), targets="h100", gemm="fast")',
    ),
    (
        "ValueError",
        "`per` is one of 'tensor', 'row', 'block', 'tile'; got 'group'",
        'hs.Factor(element="e4m3", per="group")',
    ),
    ("ValueError", "a recipe is a Recipe or one of 'f8'", 'hs.Policy(compute="bf16", recipe="f9")'),
    (
        "ValueError",
        "groups.size must be even, since two codes share a byte; got size=3",
        'hs.quant.quantize(w, "int4", groups=hs.quant.Groups(-1, 3))',
    ),
    (
        "TypeError",
        "needs float32; got bfloat16[4]. Convert it: value.astype(jnp.float32)",
        "hs.quant.split(w.astype(jnp.bfloat16), bits=8)",
    ),
    (
        "ValueError",
        "implementation must be None, 'xla', 'gpu', 'tpu' or 'interpret'; got 'cpu'",
        'step(hs.optim.flash_adamw(1e-3, implementation="cpu"))',
    ),
    (
        "ValueError",
        'sites must be "scopes", "ops" or a function of a `debug.Site`, got \'lines\'',
        'hs.debug.record(loss, sites="lines").init(w, x)',
    ),
    (
        "TypeError",
        "`path` of `to_json` must be a path or None; got 3 (int)",
        'hs.explain(loss, "bf16")(w, x).to_json(3)',
    ),
    (
        "ValueError",
        "`low` must be a share, from 0 to 1; got 95. 95 % is 0.95",
        'hs.explain(loss, "bf16")(w, x).check(low=95)',
    ),
    (
        "ValueError",
        "`max_findings` must be how many findings there may be, 0 or more; got -1",
        'hs.explain(loss, "bf16")(w, x).check(max_findings=-1)',
    ),
    (
        "ValueError",
        "`step` must have at most 63 bits; got 65",
        "hs.debug.Live().update(2**64, loss=1.0)",
    ),
    (
        "ValueError",
        "`value` must have the axis of Groups(axis=-2, size=32); got float32[4]",
        "hs.quant.Groups(-2).divided(w)",
    ),
    (
        "ValueError",
        "`shape` must have the axis of Groups(axis=-2, size=32), counted from the end; got (4,)",
        "hs.quant.Groups(-2).count((4,))",
    ),
    (
        "ValueError",
        "`value` must be what `divided` makes of an array of shape (2, 64); got float32[4]",
        "hs.quant.Groups(-1).whole(w, (2, 64))",
    ),
    (
        "ValueError",
        "`op` and `scope` of a rule cannot be empty; got op=None, scope=''",
        'hs.PrecisionRule("float32", scope="")',
    ),
    (
        "TypeError",
        "`forward` of `Recipe` must be a tuple of a Factor and a Factor; got ('e4m3', 'e4m3')",
        'dataclasses.replace(hs.RECIPES["f8"], forward=("e4m3", "e4m3"))',
    ),
]

# The tests' type checker is an import hook of this process and would object first. So another
# process makes all calls, once, and says what each of them raised.
PROGRAM = """
import dataclasses, json, sys
import jax.numpy as jnp
import optax
import halfstep as hs
import halfstep.quant
from halfstep._policy import as_policy
from halfstep._training.gate import gated

def loss(w, x):
    return jnp.sum(w * x)

def step(optimizer):
    params, state = optimizer.prepare({"w": jnp.ones((64, 64))})
    optimizer.update(params, state, params)

w = x = jnp.ones(4)
raised = []
for call in json.load(sys.stdin):
    try:
        eval(call)
    except Exception as error:
        raised.append([[kind.__name__ for kind in type(error).__mro__], str(error)])
    else:
        raised.append([[], "nothing was raised"])
print(json.dumps(raised))
"""


@pytest.fixture(scope="module")
def raised() -> dict[str, tuple[list[str], str]]:
    """The classes and the message of what each call raises."""
    calls = [call for _, _, call in ROWS]
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        cwd=pathlib.Path(__file__).parents[1],
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return dict(zip(calls, json.loads(made.stdout), strict=True))


@pytest.mark.parametrize(("kind", "message", "call"), ROWS, ids=[call for *_, call in ROWS])
def test_plain_errors(kind: str, message: str, call: str, raised: dict[str, tuple[list[str], str]]):
    kinds, said = raised[call]
    assert message in said
    assert kind in kinds
