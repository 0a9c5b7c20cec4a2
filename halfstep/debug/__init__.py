"""Where did it start? Numbers of a program while it runs, and what to make of them."""

from halfstep.debug._bisect import bisect as bisect
from halfstep.debug._bisection import (
    Bisection as Bisection,
    Needed as Needed,
)
from halfstep.debug._capture import (
    Capture as Capture,
    load_capture as load_capture,
)
from halfstep.debug._compare import compare as compare
from halfstep.debug._comparison import Comparison as Comparison
from halfstep.debug._deviation import (
    Deviation as Deviation,
    GradientDeviation as GradientDeviation,
)
from halfstep.debug._distance import Distance as Distance
from halfstep.debug._finding import (
    NonFinite as NonFinite,
    Operand as Operand,
)
from halfstep.debug._live import Live as Live
from halfstep.debug._log import Log as Log
from halfstep.debug._nonfinite import first_nonfinite as first_nonfinite
from halfstep.debug._range import Range as Range
from halfstep.debug._record import (
    Recorder as Recorder,
    record as record,
)
from halfstep.debug._report import DebugReport as DebugReport
from halfstep.debug._site import Site as Site
from halfstep.debug._site_history import Trace as Trace
