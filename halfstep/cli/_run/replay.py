"""Run `halfstep replay`."""

import argparse
import json

from halfstep._base import dtype_name
from halfstep._policy import Policy
from halfstep.cli._command import CommandError, answer, kept_apart
from halfstep.cli._load import checked_pair, load
from halfstep.debug import NonFinite, first_nonfinite, load_capture


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
