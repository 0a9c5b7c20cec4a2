"""Errors for arguments of the wrong kind, as users see them: without the tests' type checker."""

import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.core, pytest.mark.types]

CASES = r"""
import jax, jax.numpy as jnp, halfstep as hs
from halfstep._training.gate import gated

def loss(w, x): return jnp.sum(w * x)
w = x = jnp.ones(4)

def raises(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), (text, str(error))
    else:
        raise SystemExit(f"nothing raised where {text!r} was due")

def _step(optimizer):
    params = {"w": jnp.ones((64, 64))}
    params, state = optimizer.prepare(params)
    optimizer.update(params, state, params)

raises(ValueError, "`gate` is 'loop', 'cond' or 'select'; got 'switch'",
       lambda: gated(True, lambda s: s, 1, gate="switch"))
raises(ValueError, "`axis_reduction` is 'sum' or 'mean'; got 'max'",
       lambda: hs.filter_grad(loss, axis_reduction="max"))
raises(ValueError, "`microbatch_reduction` is 'sum' or 'mean'; got 'max'",
       lambda: hs.filter_grad(loss, microbatch_reduction="max"))
raises(TypeError, "`scaling` is a DynamicLossScaling, StaticLossScaling or NoLossScaling; got str",
       lambda: hs.filter_grad(loss, "bf16"))
raises(TypeError, "a policy is a Policy or a text such as 'bf16'",
       lambda: hs.filter_grad(loss, policy=jnp.float16))
raises(TypeError, "`keep` is a sequence of path rules: write keep=('state',)",
       lambda: hs.filter_grad(loss, keep="state"))
raises(TypeError, "force_full_precision takes a function or a module, got int",
       lambda: hs.force_full_precision(3))
raises(TypeError, "keep_precision takes a function or a module, got int",
       lambda: hs.keep_precision(3))
raises(TypeError, "a rule is a PrecisionRule or a text such as 'op:tanh=compute'; got 3",
       lambda: hs.Policy(rules=(3,)))
raises(TypeError, "`rules` is a sequence of rules; write rules=('op:tanh=compute',)",
       lambda: hs.Policy(rules="op:tanh=compute"))
raises(ValueError, "`mode` is 'autocast' or 'inputs'; got 'all'", lambda: hs.Policy(mode="all"))
raises(ValueError, "a rule's outcome is one of compute, float32",
       lambda: hs.PrecisionRule("bf16", op="tanh"))
raises(ValueError, "kind must be one of split16, split8, float32, stochastic; got 'split12'",
       lambda: hs.optim.master(None, "split12"))
raises(ValueError, "master_bits must be 24, 32, 'auto' or None, and not traced; got 16",
       lambda: hs.optim.flash_adamw(1e-3, master_bits=16))
raises(ValueError, "rounding must be 'nearest' or 'stochastic'; got 'up'",
       lambda: hs.optim.flash_lion(1e-3, rounding="up"))
raises(ValueError, "scale_dtype must be bfloat16 or float32; got float16",
       lambda: hs.optim.flash_sgd(1e-3, scale_dtype="float16"))
raises(TypeError, "`keep` is a sequence of path rules; write keep=('state',)",
       lambda: hs.Policy(keep="state"))
raises(ValueError, "`residuals` is 'e4m3', 'e5m2' or None; got 'e3m4'",
       lambda: hs.Policy(residuals="e3m4"))
raises(TypeError, "a policy has no field comptue; use one of param, compute",
       lambda: hs.Policy().replace(comptue="bf16"))
raises(ValueError, "a path rule cannot contain a comma; got 'a,b'. Write '?' in its place",
       lambda: hs.cast_tree({"a": w}, "bf16", keep=("a,b",)))
raises(hs.PreflightError, 'gemm must be "auto", "triton" or "library"; got \'fast\'',
       lambda: hs.preflight(loss, (w, x), targets="h100", gemm="fast"))
raises(ValueError, "`per` is one of 'tensor', 'row', 'block', 'tile'; got 'group'",
       lambda: hs.Factor(element="e4m3", per="group"))
raises(ValueError, "a recipe is a Recipe or one of 'f8'",
       lambda: hs.Policy(compute="bf16", recipe="f9"))
raises(ValueError, "groups.size must be even, since two codes share a byte; got size=3",
       lambda: hs.quant.quantize(w, "int4", groups=hs.quant.Groups(-1, 3)))
raises(TypeError, "needs float32; got bfloat16[4]. Convert it: value.astype(jnp.float32)",
       lambda: hs.quant.split(w.astype(jnp.bfloat16), bits=8))
raises(ValueError, "implementation must be None, 'xla', 'gpu', 'tpu' or 'interpret'; got 'cpu'",
       lambda: _step(hs.optim.flash_adamw(1e-3, implementation="cpu")))
raises(ValueError, 'sites must be "scopes", "ops" or a function of a `debug.Site`, got \'lines\'',
       lambda: hs.debug.record(loss, sites="lines").init(w, x))
print("all raised")
"""


def test_plain_errors():
    root = pathlib.Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", CASES], capture_output=True, text=True, cwd=root, check=False
    )
    assert result.stdout.strip() == "all raised", result.stderr
