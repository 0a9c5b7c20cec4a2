"""What `check` says."""


class LintError(AssertionError):
    """A function misses what was required of it; the message lists every miss with its line."""
