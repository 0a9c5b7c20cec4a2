"""Run an unmodified float32 function in mixed precision."""

from halfstep._autocast.again.regions import (
    Region as Region,
    schedule as schedule,
)
from halfstep._autocast.again.repeats import Repeat as Repeat
from halfstep._autocast.again.segments import (
    crossing as crossing,
    held_bytes as held_bytes,
    is_apart as is_apart,
)
from halfstep._autocast.again.surroundings import Surroundings as Surroundings
from halfstep._autocast.decide import operation_of as operation_of
from halfstep._autocast.f8.eligible import (
    NO_RECIPE as NO_RECIPE,
    TWO_ACTIVATIONS as TWO_ACTIVATIONS,
    TWO_PARAMETERS as TWO_PARAMETERS,
)
from halfstep._autocast.f8.product import (
    ELEMENTS as ELEMENTS,
    OFF as OFF,
    ROUNDED as ROUNDED,
    RecipeProduct as RecipeProduct,
    Slot as Slot,
)
from halfstep._autocast.kinds import (
    Kind as Kind,
)
from halfstep._autocast.matching import RuleMatches as RuleMatches, lines_of as lines_of
from halfstep._autocast.nested import (
    body_plans as body_plans,
    carried_operands as carried_operands,
)
from halfstep._autocast.observing import collected_plans as collected_plans, observed as observed
from halfstep._autocast.picks import (
    PICKS as PICKS,
)
from halfstep._autocast.planning import plan as plan
from halfstep._autocast.plans import (
    FLOAT32 as FLOAT32,
    Decision as Decision,
    Plan as Plan,
    Settings as Settings,
    check_sites as check_sites,
    decided as decided,
    held_dtype as held_dtype,
    inner_plans as inner_plans,
    named_sites as named_sites,
    out_kinds as out_kinds,
    placed as placed,
)
from halfstep._autocast.primitives import (
    CONTRACTIONS as CONTRACTIONS,
    GROUPS as GROUPS,
    TABLE as TABLE,
    Rule as Rule,
)
from halfstep._autocast.run import (
    Environment as Environment,
    Sharing as Sharing,
    held as held,
)
from halfstep._autocast.stored.names import StoreLabel as StoreLabel, stored_bytes as stored_bytes
from halfstep._autocast.stored.saves import (
    Again as Again,
    Saves as Saves,
)
from halfstep._autocast.tracing import TracedCall as TracedCall, trace as trace
from halfstep._autocast.transform import (
    autocast as autocast,
    check_rules as check_rules,
    check_state as check_state,
    rewritten as rewritten,
    run_traced as run_traced,
    settings_of as settings_of,
)
