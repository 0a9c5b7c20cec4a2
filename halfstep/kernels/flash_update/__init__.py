"""One optimizer step of one parameter: decode, update, encode, in one pass over memory."""

from halfstep.kernels.flash_update._api import (
    Implementation as Implementation,
    flash_update as flash_update,
)
from halfstep.kernels.flash_update._rule import Leaf as Leaf, Scalars as Scalars, Spec as Spec
