"""The `halfstep` command."""

from halfstep.cli._main import main as main
