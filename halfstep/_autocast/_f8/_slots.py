"""Where a recipe's state goes: one slot for each product, stacked in loops."""

from collections.abc import Mapping
from typing import Any

Slots = Mapping[int, Any]
"""By the number of an operation: its slot, or those of what is inside of it."""
