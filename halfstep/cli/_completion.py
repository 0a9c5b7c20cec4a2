"""`halfstep completion`: what a shell needs to complete the command."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from halfstep.cli._arguments import add_command
from halfstep.cli._errors import CommandError

SHELLS = ("bash", "zsh", "fish")

_DESCRIPTION = """\
Print a script with which a shell completes commands, options and the names of
files. It is made once, by shtab, and asks nobody when the Tab key is pressed.

The exit status is 0, and 2 without shtab: pip install "halfstep[completion]".
"""

_EXAMPLE = """\
halfstep completion bash > ~/.local/share/bash-completion/completions/halfstep
halfstep completion zsh > ~/.zsh/completions/_halfstep
halfstep completion fish > ~/.config/fish/completions/halfstep.fish
"""


def add(commands: Any, whole: Callable[[], argparse.ArgumentParser]) -> None:
    """Add the subcommand to the command, which `whole` makes."""

    def run(arguments: argparse.Namespace) -> int:
        sys.stdout.write(script(whole(), arguments.shell))
        return 0

    parser = add_command(
        commands,
        "completion",
        run,
        help="what does my shell need to complete all this?",
        description=_DESCRIPTION,
        example=_EXAMPLE,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script of a shell for a command."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise CommandError(
            "scripts for shells are made by shtab, which is not installed. "
            'Install it with: pip install "halfstep[completion]"'
        ) from error
    kinds = {"FILE": shtab.FILE, "MAKE_LOSS": shtab.FILE, "MAKE_STEP": shtab.FILE}
    for action in _actions(parser):
        if kind := {**kinds, "DIR": shtab.DIRECTORY}.get(str(action.metavar)):
            # Where shtab looks for it.
            action.complete = kind  # pyright: ignore[reportAttributeAccessIssue]
    return f"{shtab.complete(parser, shell).rstrip()}\n"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        # Of commands, the choices are their parsers.
        if isinstance(action.choices, Mapping):
            for command in action.choices.values():
                yield from _actions(command)
