"""All rows, and which spellings each has."""

from collections.abc import Callable, Mapping

from tests.loops import _models, _recurrences
from tests.loops._loop import SPELLINGS, Program

LOOPS: Mapping[str, Callable[[], Program]] = {**_recurrences.ROWS, **_models.LOOPS}
MEASURED: Mapping[str, Callable[[], Program]] = _models.MEASURED
ROWS: Mapping[str, Callable[[], Program]] = {**LOOPS, **MEASURED}
WITHOUT = "no loop"
"""The spelling of rows without a loop."""
CASES = (
    *((row, spelling) for row in LOOPS for spelling in SPELLINGS),
    *((row, WITHOUT) for row in MEASURED),
)
