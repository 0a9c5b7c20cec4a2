"""An unmodified float32 function in mixed precision."""

from halfstep._autocast._api import autocast as autocast
from halfstep._autocast._table import GROUPS as GROUPS, TABLE as TABLE, Rule as Rule
