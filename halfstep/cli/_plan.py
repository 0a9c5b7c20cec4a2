"""Implement `halfstep plan`: find a policy with which a step fits into memory."""

import argparse

from halfstep.cli._command import Commands, add_command, add_json
from halfstep.cli._preflight import add_compiler, target

_DESCRIPTION = """\
Find a policy with which a training step fits into a memory budget, at the least
cost: what is kept for the backward pass in 16 bits, in fewer, on the host, and
what is recomputed.

MAKE_STEP is as for "halfstep preflight": it is called with policy=, and returns
a step and its arguments (arrays or jax.ShapeDtypeStructs):

    def make_step(policy="f32"):
        ...
        return jax.jit(step, donate_argnums=(0, 1)), (params, opt_state, images)

8 and 4 bits change gradients, so they are used only with --max-gradient-error
0.02, say, which is measured on what --batches train.py:batches returns: a list
of arguments with real arrays.

The exit status is 0 for a plan, 1 if none fits, and 2 if something went wrong.
"""

_EXAMPLE = """\
halfstep plan train.py:make_step --target h100 --budget 40GiB
halfstep plan train.py:make_step --target rtx4090 --out plan.toml --plot a.png
halfstep plan train.py:make_step --target v5e --budget 80%
"""


def add(commands: Commands) -> None:
    """Add the subcommand to the command."""
    parser = add_command(
        commands,
        "plan",
        run,
        help="how is it made to fit into the memory that there is?",
        description=_DESCRIPTION,
        example=_EXAMPLE,
    )
    parser.add_argument(
        "make_step", metavar="MAKE_STEP", help="module:function or file.py:function"
    )
    parser.add_argument("--target", type=target, required=True, help="such as h100, h100:8, v5e")
    parser.add_argument(
        "--budget", help="for each device: 20GiB, 80%%, or bytes (all that JAX takes)"
    )
    parser.add_argument("--policy", default="bf16", help="what to start from (bf16)")
    parser.add_argument(
        "--max-gradient-error",
        type=float,
        metavar="SHARE",
        help="the most that low precision may change the gradients, such as 0.02",
    )
    parser.add_argument(
        "--batches", metavar="BATCHES", help="module:function that returns a list of arguments"
    )
    parser.add_argument("--compiles", type=int, default=12, help="the most compiles (12)")
    add_compiler(parser)
    parser.add_argument("--out", metavar="FILE", help="write the policy, for Policy.load (TOML)")
    add_json(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw all candidates (PNG, PDF, SVG)")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from halfstep.cli._run import plan

    return plan.run(arguments)
