"""Implement `halfstep replay`: run a captured bad step again, in its policy and in float32."""

import argparse
import json

from halfstep._base import dtype_name
from halfstep._policy import Policy
from halfstep.cli._command import (
    CommandError,
    Commands,
    add_command,
    add_json,
    add_maker,
    answer,
    kept_apart,
    policy,
)
from halfstep.cli._load import checked_pair, load
from halfstep.debug import NonFinite, first_nonfinite, load_capture

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
    found: dict[str, NonFinite | None] = {}
    chosen = _short(arguments.policy)
    with kept_apart(arguments):
        name, make = arguments.make_step, load(arguments.make_step)
        # The run in float32 tells a range that is too small from a bug that no policy causes.
        for which in dict.fromkeys((chosen, "f32")):
            step, args = checked_pair(name, make(which), "step")
            try:
                captured = load_capture(arguments.directory, *args)
            except ValueError as error:
                raise CommandError(f"{error}.") from error
            found[which] = first_nonfinite(step, *captured)
    lines = [f"{which}: {'all finite' if got is None else got}" for which, got in found.items()]
    made = {which: None if got is None else got.to_dict() for which, got in found.items()}
    answer(arguments, "\n".join(lines), json.dumps(made, indent=2))
    return 0 if found[chosen] is None else 1


def _short(which: Policy) -> str:
    """Return the short name of a policy if it has one, and its full text otherwise."""
    name = dtype_name(which.compute) if which.recipe is None else which.recipe.name
    return name if Policy.parse(name) == which else str(which)
