"""Express what a user asks for: policies, rules, recipes, casts, and parts kept in float32."""

from halfstep._policy.cast import (
    cast_arguments as cast_arguments,
    cast_function as cast_function,
    cast_to_bfloat16 as cast_to_bfloat16,
    cast_to_float16 as cast_to_float16,
    cast_to_float32 as cast_to_float32,
    cast_to_full_precision as cast_to_full_precision,
    cast_to_half_precision as cast_to_half_precision,
    cast_tree as cast_tree,
    is_castable as is_castable,
)
from halfstep._policy.keep import (
    force_full_precision as force_full_precision,
    keep_precision as keep_precision,
)
from halfstep._policy.kept_calls import KEEP_SCOPE as KEEP_SCOPE
from halfstep._policy.policy import (
    Policy as Policy,
    as_policy as as_policy,
)
from halfstep._policy.recipe import (
    RECIPES as RECIPES,
    Factor as Factor,
    Leg as Leg,
    Recipe as Recipe,
    state_of as state_of,
)
from halfstep._policy.rules import (
    Operation as Operation,
    Outcome as Outcome,
    PrecisionFunction as PrecisionFunction,
    PrecisionRule as PrecisionRule,
    plain_scope as plain_scope,
    recipes_of as recipes_of,
)
from halfstep._policy.store_rules import (
    StoreOutcome as StoreOutcome,
    StoreRule as StoreRule,
)
