"""Take a training step: gradients, loss scaling, the verdict, and the update or the skip."""

from halfstep._training.collective import vary as vary
from halfstep._training.f8_scaling import (
    F8Scaling as F8Scaling,
    SiteState as SiteState,
)
from halfstep._training.gate import (
    gated as gated,
    select_tree as select_tree,
    transaction as transaction,
)
from halfstep._training.grad import (
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
    split_result as split_result,
    without_value as without_value,
)
from halfstep._training.ledger import (
    Ledger as Ledger,
    SkipLimitError as SkipLimitError,
)
from halfstep._training.scaling import (
    AbstractLossScaling as AbstractLossScaling,
    DynamicLossScaling as DynamicLossScaling,
    NoLossScaling as NoLossScaling,
    StaticLossScaling as StaticLossScaling,
    multiplied as multiplied,
    power_of_two as power_of_two,
)
from halfstep._training.update import (
    StepsInPlace as StepsInPlace,
    apply_gradients as apply_gradients,
    optimizer_update as optimizer_update,
)
from halfstep._training.verdict import (
    Verdict as Verdict,
    all_finite as all_finite,
    as_predicate as as_predicate,
    finite_flags as finite_flags,
    judge as judge,
    magnitudes as magnitudes,
)
