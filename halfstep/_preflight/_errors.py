"""What can go wrong before there is an answer."""


class PreflightError(RuntimeError):
    """There is no answer: a compiler is missing, the step cannot be lowered, a compile failed.

    The message says what was required, what came, and what to type.
    """


class DoesNotFitError(PreflightError):
    """A step needs more memory than its target has; see `PreflightReport.require_fit`."""


class RefusedError(PreflightError):
    """A compiler refused the program; with other flags it might not."""
