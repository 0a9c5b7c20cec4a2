"""Compile a training step for hardware that is not there, and say whether it fits."""

from halfstep._preflight.hlo.analysis import Collective as Collective, Contraction as Contraction
from halfstep._preflight.hlo.products import F8Count as F8Count, Product as Product
from halfstep._preflight.interface import (
    Gemm as Gemm,
    Preflight as Preflight,
    preflight as preflight,
)
from halfstep._preflight.planning.memory_plan import (
    MemoryPlan as MemoryPlan,
    PlanCandidate as PlanCandidate,
)
from halfstep._preflight.planning.planner import plan as plan
from halfstep._preflight.preflight_errors import (
    DoesNotFitError as DoesNotFitError,
    PreflightError as PreflightError,
)
from halfstep._preflight.report.peak import Peak as Peak, PeakBuffer as PeakBuffer
from halfstep._preflight.report.peak_report import PeakReport as PeakReport
from halfstep._preflight.report.preflight_entry import PreflightEntry as PreflightEntry
from halfstep._preflight.report.preflight_report import PreflightReport as PreflightReport
from halfstep._preflight.report.roles import Argument as Argument
from halfstep._preflight.report.roofline import Roofline as Roofline
from halfstep._preflight.search import LargestBatch as LargestBatch
from halfstep._preflight.target.accelerators import (
    ACCELERATORS as ACCELERATORS,
    Accelerator as Accelerator,
)
from halfstep._preflight.target.targets import (
    Target as Target,
    parse_target as parse_target,
)
