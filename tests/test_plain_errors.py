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
        "force_full_precision takes a function or a module, got int",
        "hs.force_full_precision(3)",
    ),
    ("TypeError", "keep_precision takes a function or a module, got int", "hs.keep_precision(3)"),
    (
        "TypeError",
        "a rule is a PrecisionRule or a text such as 'op:tanh=compute'; got 3",
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
]

# The tests' type checker is an import hook of this process and would object first. So another
# process makes all calls, once, and says what each of them raised.
PROGRAM = """
import json, sys
import jax.numpy as jnp
import optax
import halfstep as hs
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
