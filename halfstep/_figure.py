"""The figures that reports are drawn into."""

from typing import Any


def figure_of(what: str) -> Any:
    """An empty figure, which has no size yet.

    It is made without pyplot: no window opens, and no state outlives the caller.

    Raises:
        ModuleNotFoundError: Without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"drawing {what} needs matplotlib, which is not installed. Install it with: "
            'pip install "halfstep[plot]"'
        ) from error
    return Figure(layout="constrained")
