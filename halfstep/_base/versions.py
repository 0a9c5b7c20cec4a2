"""Name the versions of Python and JAX that the tests run on.

This is the only place in the package that names them: `halfstep doctor` reads it, and so does the
error about a primitive whose parameters another JAX has renamed. A test compares it with the pins
in `requirements/`.
"""

TESTED_JAX = ("0.10.2", "0.11.2", "0.12.0.1")
"""The versions of JAX that the tests run on, oldest first."""

TESTED_PYTHON = ("3.11", "3.12", "3.13")
"""The Python on which each of `TESTED_JAX` is tested, in the same order."""


def known_to_work() -> str:
    """Return the tested range of JAX versions as words, for errors and reports.

    ```python
    from halfstep._base import known_to_work

    print(known_to_work())  # JAX 0.10.2 to 0.12.0.1
    ```
    """
    return f"JAX {TESTED_JAX[0]} to {TESTED_JAX[-1]}"
