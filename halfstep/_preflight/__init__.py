"""Will a step fit, on hardware that is not there?"""

from halfstep._preflight._accelerators import (
    ACCELERATORS as ACCELERATORS,
    Accelerator as Accelerator,
)
from halfstep._preflight._analysis import Collective as Collective, Contraction as Contraction
from halfstep._preflight._api import Preflight as Preflight, preflight as preflight
from halfstep._preflight._changes import Change as Change
from halfstep._preflight._comparison import (
    EntryComparison as EntryComparison,
    PreflightComparison as PreflightComparison,
)
from halfstep._preflight._entry import PreflightEntry as PreflightEntry
from halfstep._preflight._errors import (
    DoesNotFitError as DoesNotFitError,
    PreflightError as PreflightError,
)
from halfstep._preflight._f8 import F8Count as F8Count, Product as Product
from halfstep._preflight._report import PreflightReport as PreflightReport
from halfstep._preflight._roles import Argument as Argument
from halfstep._preflight._roofline import Roofline as Roofline
from halfstep._preflight._search import LargestBatch as LargestBatch
from halfstep._preflight._targets import (
    Target as Target,
    parse_target as parse_target,
)
