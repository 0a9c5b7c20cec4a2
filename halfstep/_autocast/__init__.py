"""An unmodified float32 function in mixed precision."""

from halfstep._autocast._api import (
    autocast as autocast,
    check_state as check_state,
    rewritten as rewritten,
    settings_of as settings_of,
)
from halfstep._autocast._eligible import (
    TWO_ACTIVATIONS as TWO_ACTIVATIONS,
    TWO_PARAMETERS as TWO_PARAMETERS,
)
from halfstep._autocast._f8._marks import (
    ELEMENTS as ELEMENTS,
    ROUNDED as ROUNDED,
)
from halfstep._autocast._f8._site import (
    OFF as OFF,
    Site as Site,
    Slot as Slot,
)
from halfstep._autocast._islands import (
    Island as Island,
    schedule as schedule,
)
from halfstep._autocast._kinds import (
    Kind as Kind,
)
from halfstep._autocast._loops import (
    hold as hold,
)
from halfstep._autocast._picks import (
    PICKS as PICKS,
)
from halfstep._autocast._plan import (
    plan as plan,
)
from halfstep._autocast._recompute import (
    Place as Place,
)
from halfstep._autocast._run import (
    Environment as Environment,
    bind as bind,
    held as held,
    operand_of as operand_of,
)
from halfstep._autocast._sites import (
    check_sites as check_sites,
    named_sites as named_sites,
    placed as placed,
)
from halfstep._autocast._table import (
    CONTRACTIONS as CONTRACTIONS,
    GROUPS as GROUPS,
    TABLE as TABLE,
    Rule as Rule,
)
from halfstep._autocast._trace import trace as trace
from halfstep._autocast._types import (
    FLOAT32 as FLOAT32,
    Decision as Decision,
    Plan as Plan,
    Settings as Settings,
    decided as decided,
    held_dtype as held_dtype,
    inner_plans as inner_plans,
)
