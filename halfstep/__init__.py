"""Mixed-precision training for JAX: cast, scale, differentiate, update or skip."""

from typing import TYPE_CHECKING

from halfstep._version import __version__ as __version__

# Each name is imported when it is first used, so that no program waits for parts that it does not
# use. Type checkers, editors and the documentation read the imports; Python reads the table below.
# A test compares both.
if TYPE_CHECKING:
    from halfstep import (
        debug as debug,
        optim as optim,
        quant as quant,
        reliability as reliability,
    )
    from halfstep._autocast import autocast as autocast
    from halfstep._base import (
        FORMATS as FORMATS,
        Format as Format,
        Report as Report,
        half_dtype as half_dtype,
        half_precision as half_precision,
    )
    from halfstep._explain import (
        ExplainCarry as ExplainCarry,
        ExplainEntry as ExplainEntry,
        ExplainF8 as ExplainF8,
        ExplainFinding as ExplainFinding,
        ExplainOthers as ExplainOthers,
        ExplainReport as ExplainReport,
        ExplainResidual as ExplainResidual,
        ExplainTotals as ExplainTotals,
        LintError as LintError,
        explain as explain,
    )
    from halfstep._policy import (
        RECIPES as RECIPES,
        Factor as Factor,
        Operation as Operation,
        Policy as Policy,
        PrecisionRule as PrecisionRule,
        Recipe as Recipe,
        StoreRule as StoreRule,
        cast_function as cast_function,
        cast_to_bfloat16 as cast_to_bfloat16,
        cast_to_float16 as cast_to_float16,
        cast_to_float32 as cast_to_float32,
        cast_to_full_precision as cast_to_full_precision,
        cast_to_half_precision as cast_to_half_precision,
        cast_tree as cast_tree,
        force_full_precision as force_full_precision,
        keep_precision as keep_precision,
    )
    from halfstep._preflight import (
        DoesNotFitError as DoesNotFitError,
        LargestBatch as LargestBatch,
        MemoryPlan as MemoryPlan,
        PeakReport as PeakReport,
        PlanCandidate as PlanCandidate,
        PreflightEntry as PreflightEntry,
        PreflightError as PreflightError,
        PreflightReport as PreflightReport,
        plan as plan,
        preflight as preflight,
    )
    from halfstep._training import (
        AbstractLossScaling as AbstractLossScaling,
        DynamicLossScaling as DynamicLossScaling,
        F8Scaling as F8Scaling,
        Ledger as Ledger,
        NoLossScaling as NoLossScaling,
        SiteState as SiteState,
        SkipLimitError as SkipLimitError,
        StaticLossScaling as StaticLossScaling,
        Verdict as Verdict,
        all_finite as all_finite,
        apply_gradients as apply_gradients,
        filter_grad as filter_grad,
        filter_value_and_grad as filter_value_and_grad,
        optimizer_update as optimizer_update,
        select_tree as select_tree,
        transaction as transaction,
    )
else:
    from halfstep import _lazy

    # Below `else`, because type checkers would accept every name of a module with `__getattr__`.
    __all__, __dir__, __getattr__ = _lazy.attach(
        __name__,
        {
            "halfstep": (
                "debug",
                "optim",
                "quant",
                "reliability",
            ),
            "halfstep._autocast": ("autocast",),
            "halfstep._base": (
                "FORMATS",
                "Format",
                "Report",
                "half_dtype",
                "half_precision",
            ),
            "halfstep._explain": (
                "ExplainEntry",
                "ExplainF8",
                "ExplainFinding",
                "ExplainOthers",
                "ExplainReport",
                "ExplainCarry",
                "ExplainResidual",
                "ExplainTotals",
                "LintError",
                "explain",
            ),
            "halfstep._policy": (
                "RECIPES",
                "Factor",
                "Operation",
                "Policy",
                "PrecisionRule",
                "Recipe",
                "StoreRule",
                "cast_function",
                "cast_to_bfloat16",
                "cast_to_float16",
                "cast_to_float32",
                "cast_to_full_precision",
                "cast_to_half_precision",
                "cast_tree",
                "force_full_precision",
                "keep_precision",
            ),
            "halfstep._preflight": (
                "DoesNotFitError",
                "LargestBatch",
                "MemoryPlan",
                "PeakReport",
                "PlanCandidate",
                "PreflightEntry",
                "PreflightError",
                "PreflightReport",
                "plan",
                "preflight",
            ),
            "halfstep._training": (
                "AbstractLossScaling",
                "DynamicLossScaling",
                "F8Scaling",
                "Ledger",
                "NoLossScaling",
                "SiteState",
                "SkipLimitError",
                "StaticLossScaling",
                "Verdict",
                "all_finite",
                "apply_gradients",
                "filter_grad",
                "filter_value_and_grad",
                "optimizer_update",
                "select_tree",
                "transaction",
            ),
        },
    )
    _lazy.prepare_jax()
