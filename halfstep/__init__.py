"""Mixed-precision training for JAX: cast, scale, differentiate, update or skip."""

from halfstep import (
    debug as debug,
    optim as optim,
    quant as quant,
    reliability as reliability,
)
from halfstep._autocast import autocast as autocast
from halfstep._cast import (
    cast_function as cast_function,
    cast_to_bfloat16 as cast_to_bfloat16,
    cast_to_float16 as cast_to_float16,
    cast_to_float32 as cast_to_float32,
    cast_to_full_precision as cast_to_full_precision,
    cast_to_half_precision as cast_to_half_precision,
    cast_tree as cast_tree,
    force_full_precision as force_full_precision,
)
from halfstep._explain import (
    ExplainEntry as ExplainEntry,
    ExplainF8 as ExplainF8,
    ExplainFinding as ExplainFinding,
    ExplainOthers as ExplainOthers,
    ExplainReport as ExplainReport,
    ExplainTotals as ExplainTotals,
    LintError as LintError,
    explain as explain,
)
from halfstep._f8_scaling import F8Scaling as F8Scaling, SiteState as SiteState
from halfstep._formats import (
    FORMATS as FORMATS,
    Format as Format,
    half_dtype as half_dtype,
    half_precision as half_precision,
)
from halfstep._gate import (
    select_tree as select_tree,
    transaction as transaction,
)
from halfstep._grad import (
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
)
from halfstep._keep import keep_precision as keep_precision
from halfstep._ledger import (
    Ledger as Ledger,
    SkipLimitError as SkipLimitError,
)
from halfstep._policy import Policy as Policy
from halfstep._preflight import (
    DoesNotFitError as DoesNotFitError,
    LargestBatch as LargestBatch,
    PreflightComparison as PreflightComparison,
    PreflightEntry as PreflightEntry,
    PreflightError as PreflightError,
    PreflightReport as PreflightReport,
    preflight as preflight,
)
from halfstep._recipe import (
    RECIPES as RECIPES,
    Factor as Factor,
    Recipe as Recipe,
)
from halfstep._reports import Report as Report
from halfstep._rules import (
    Operation as Operation,
    PrecisionRule as PrecisionRule,
)
from halfstep._scaling import (
    AbstractLossScaling as AbstractLossScaling,
    DynamicLossScaling as DynamicLossScaling,
    NoLossScaling as NoLossScaling,
    StaticLossScaling as StaticLossScaling,
)
from halfstep._update import (
    apply_gradients as apply_gradients,
    optimizer_update as optimizer_update,
)
from halfstep._verdict import (
    Verdict as Verdict,
    all_finite as all_finite,
)
from halfstep._version import __version__ as __version__
