"""Read a memory budget: bytes, a string such as `"5GiB"`, a share, or the device's own memory."""

import re
from types import MappingProxyType

from halfstep._base import size
from halfstep._preflight.preflight_errors import PreflightError

_UNITS = MappingProxyType(
    {
        "": 1,
        "b": 1,
        **{f"{letter}ib": 2 ** (10 * (i + 1)) for i, letter in enumerate("kmgt")},
        **{f"{letter}b": 10 ** (3 * (i + 1)) for i, letter in enumerate("kmgt")},
    }
)


def parse_budget(budget: int | float | str | None, *, usable: int) -> int:
    """Convert a budget to bytes.

    Args:
        budget: Bytes; a string with a unit, `"5GiB"` or `"4.5 GB"`, or with a percent sign; a share
            above 0 and up to 1; or `None` for all usable memory.
        usable: The memory of the device that may be used. A share is a share of this memory.

    Raises:
        PreflightError: If the budget is none of these, or more than the usable memory.
    """
    if budget is None:
        return usable
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(%|[A-Za-z]*)\s*", budget)
        unit = found[2].lower() if found else "?"
        if not found or (unit != "%" and unit not in _UNITS):
            raise PreflightError(
                f'a budget is bytes, a share, or a text such as "5GiB" or "80%"; got {budget!r}. '
                "Write one of these, or leave the budget out."
            )
        amount = float(found[1]) * (usable / 100 if unit == "%" else _UNITS[unit])
    else:
        # A number up to 1 is a share: nobody has a budget of one byte.
        amount = budget * usable if 0 < budget <= 1 else float(budget)
    if not 0 < amount <= usable:
        raise PreflightError(
            f"a budget is more than nothing and at most what the target has, {size(usable)}; got "
            f"{budget!r}, which is {size(int(amount))}. Say which share JAX may take by "
            "memory_fraction=, or leave the budget out."
        )
    return int(amount)
