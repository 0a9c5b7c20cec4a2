"""Implement `halfstep replay`: run a captured bad step again, in its policy and in float32."""

import argparse

from halfstep.cli._command import Commands, add_command, add_json, add_maker, policy

_DESCRIPTION = """\
Run what a bad step was given once more, and say where it began: in a policy,
and in float32.

DIR is one of those that debug.Capture has written. MAKE_STEP names a function
of a policy that returns the step, or its loss or gradient, and arguments like
those that were captured (arrays or jax.ShapeDtypeStructs):

    def make_step(policy):
        ...
        return step, (params, state, batch)

The exit status is 0 if all is finite in the policy, 1 if not, and 2 if there
is no answer.
"""


def add(commands: Commands) -> None:
    """Add the subcommand to the command."""
    parser = add_command(
        commands,
        "replay",
        run,
        help="where did it begin, in the step that was captured?",
        description=_DESCRIPTION,
        example="halfstep replay runs/captures/0 train.py:make_step --policy f16",
    )
    parser.add_argument("directory", metavar="DIR", help="a capture: runs/captures/0")
    add_maker(parser, "make_step")
    parser.add_argument(
        "--policy", type=policy, default="bf16", help="such as bf16, f16, f8 or a file.toml (bf16)"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from halfstep.cli._run import replay

    return replay.run(arguments)
