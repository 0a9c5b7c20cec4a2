"""Debug numerics: find where non-finite values start, record a run, compare it with float32."""

from halfstep.debug._compare.bisect import bisect as bisect
from halfstep.debug._compare.bisection import (
    Bisection as Bisection,
    Needed as Needed,
)
from halfstep.debug._compare.compare import compare as compare
from halfstep.debug._compare.comparison_report import (
    Comparison as Comparison,
    Deviation as Deviation,
    GradientDeviation as GradientDeviation,
)
from halfstep.debug._compare.distance import Distance as Distance
from halfstep.debug._instrument.site import Site as Site
from halfstep.debug._instrument.stats import Range as Range
from halfstep.debug._live.live import Live as Live
from halfstep.debug._nonfinite.first_nonfinite import (
    NonFinite as NonFinite,
    Operand as Operand,
    first_nonfinite as first_nonfinite,
)
from halfstep.debug._record.capture import (
    Capture as Capture,
    load_capture as load_capture,
)
from halfstep.debug._record.debug_report import DebugReport as DebugReport, Trace as Trace
from halfstep.debug._record.record import (
    Log as Log,
    Recorder as Recorder,
    record as record,
)
