"""What the states of Optax hold, and in which code it can be stored."""

from types import MappingProxyType

_SIGNED, _ROOT = "int8", "root8"

CODES_OF = MappingProxyType(
    {
        (state, field): code
        for state, fields in {
            "ScaleByAdamState": {"mu": _SIGNED, "nu": _ROOT},
            "ScaleByAmsgradState": {"mu": _SIGNED, "nu": _ROOT, "nu_max": _ROOT},
            "ScaleByBeliefState": {"mu": _SIGNED, "nu": _ROOT},
            "ScaleByAdanState": {"m": _SIGNED, "v": _SIGNED, "n": _ROOT},
            "ScaleByAdaDeltaState": {"e_g": _ROOT, "e_x": _ROOT},
            "ScaleByAdemamixState": {"m1": _SIGNED, "nu": _ROOT},
            "ScaleByLionState": {"mu": _SIGNED},
            "ScaleByNovogradState": {"mu": _SIGNED},
            "ScaleByRmsState": {"nu": _ROOT},
            "ScaleByRmsWithCountState": {"nu": _ROOT},
            "ScaleBySM3State": {"nu": _SIGNED},
            "FactoredState": {"v": _ROOT},
            "TraceState": {"trace": _SIGNED},
            "EmaState": {"ema": _SIGNED},
            "MuonState": {"mu": _SIGNED},
            "SophiaState": {"mu": _SIGNED},
            "DAdaptAdamWState": {"exp_avg": _SIGNED, "exp_avg_sq": _ROOT},
            "ProdigyState": {"exp_avg": _SIGNED, "exp_avg_sq": _ROOT},
            "MomoState": {"exp_avg": _SIGNED},
            "MomoAdamState": {"exp_avg": _SIGNED, "exp_avg_sq": _ROOT},
        }.items()
        for field, code in fields.items()
    }
)
"""By the state's name and the field's. What is not here stays as it is: running sums (Adagrad's,
AdEMAMix's slow momentum), which change by less than a code; past gradients and parameters, of which
differences are taken; variances that are a difference (centered RMSProp's); statistics of rows and
columns, which are small; and preconditioners, whose inverse is taken."""
