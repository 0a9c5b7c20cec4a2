"""What the command says instead of a traceback."""


class CommandError(Exception):
    """Something the user gave cannot be used; the message says what and what to type."""
