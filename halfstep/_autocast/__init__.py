"""An unmodified float32 function in mixed precision."""

from halfstep._autocast._api import (
    autocast as autocast,
    check_state as check_state,
    rewritten as rewritten,
    settings_of as settings_of,
)
from halfstep._autocast._f8._site import OFF as OFF, Slot as Slot
from halfstep._autocast._sites import check_sites as check_sites, named_sites as named_sites
from halfstep._autocast._table import GROUPS as GROUPS, TABLE as TABLE, Rule as Rule
from halfstep._autocast._trace import trace as trace
