"""What runs in which precision, why, and what is wrong with it."""

from halfstep._explain.api import explain as explain
from halfstep._explain.entry import (
    ExplainEntry as ExplainEntry,
    Typed as Typed,
    name_of as name_of,
    typed as typed,
)
from halfstep._explain.errors import LintError as LintError
from halfstep._explain.f8 import ExplainF8 as ExplainF8, ExplainOthers as ExplainOthers
from halfstep._explain.finding import ExplainFinding as ExplainFinding
from halfstep._explain.report import ExplainReport as ExplainReport
from halfstep._explain.totals import ExplainTotals as ExplainTotals
