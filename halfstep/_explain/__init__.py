"""Explain what runs in which precision, why, and what is wrong with it."""

from halfstep._explain.carry_rows import ExplainCarry as ExplainCarry
from halfstep._explain.entries import (
    ExplainEntry as ExplainEntry,
    Typed as Typed,
    name_of as name_of,
    typed as typed,
)
from halfstep._explain.explain_report import ExplainReport as ExplainReport, LintError as LintError
from halfstep._explain.explained import explain as explain
from halfstep._explain.findings import ExplainFinding as ExplainFinding
from halfstep._explain.flops import operation_flops as operation_flops
from halfstep._explain.residual_rows import ExplainResidual as ExplainResidual
from halfstep._explain.totals import (
    ExplainF8 as ExplainF8,
    ExplainOthers as ExplainOthers,
    ExplainTotals as ExplainTotals,
)
