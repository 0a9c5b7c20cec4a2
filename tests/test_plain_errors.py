"""Errors for arguments of the wrong kind, as users see them: without the tests' type checker."""

import pathlib
import subprocess
import sys

CASES = r"""
import jax, jax.numpy as jnp, halfstep as hs
from halfstep._gate import gated

def loss(w, x): return jnp.sum(w * x)
w = x = jnp.ones(4)

def raises(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), (text, str(error))
    else:
        raise SystemExit(f"nothing raised where {text!r} was due")

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
raises(TypeError, "sequences of path rules: write keep=('state',)",
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
print("all raised")
"""


def test_plain_errors():
    root = pathlib.Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", CASES], capture_output=True, text=True, cwd=root, check=False
    )
    assert result.stdout.strip() == "all raised", result.stderr
