"""Implement `halfstep bisect`: find what must stay in float32."""

import argparse

from halfstep.cli._command import Commands, add_command, add_json, add_maker, policy

_DESCRIPTION = """\
Find a smallest set of scopes and operations that must stay in float32 so that
the loss and its gradients are within a tolerance of float32's. For a recipe
such as f8, find products that must stay in 16 bits. Print the policy, or write
it into a file that Policy.load reads.

MAKE_LOSS names a function that returns a loss and its arguments. The first
argument holds the parameters. It may also return a list of arguments, one entry
for each batch:

    def make_loss():
        ...
        return loss, [(params, batch) for batch in batches]

The exit status is 0 if the policy is good as it is, 1 if rules are needed, and
2 after an error.
"""


def add(commands: Commands) -> None:
    """Add the subcommand to the command."""
    parser = add_command(
        commands,
        "bisect",
        run,
        help="what must stay in float32?",
        description=_DESCRIPTION,
        example="halfstep bisect train.py:make_loss --tolerance 0.02 --output policy.toml",
    )
    add_maker(parser, "make_loss")
    parser.add_argument(
        "--policy",
        type=policy,
        default="f16,op:*=compute",
        help="one that is too narrow, or a file.toml (f16,op:*=compute: all of it in float16)",
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.01, help="the error that is good enough (0.01)"
    )
    parser.add_argument("--scopes", action="store_true", help="whole scopes, no single operations")
    parser.add_argument("--output", metavar="FILE", help="write the policy: policy.toml")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from halfstep.cli._run import bisect

    return bisect.run(arguments)
