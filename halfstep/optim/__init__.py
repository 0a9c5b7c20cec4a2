"""Compressed optimizers: AdamW in 5 bytes per parameter, Lion and SGD with momentum in 4."""

from halfstep.optim._compress import CompressedState as CompressedState, compress as compress
from halfstep.optim._layout import state_shardings as state_shardings
from halfstep.optim._master import MasterState as MasterState, master as master
from halfstep.optim._optimizers import (
    flash_adam as flash_adam,
    flash_adamw as flash_adamw,
    flash_lion as flash_lion,
    flash_sgd as flash_sgd,
)
from halfstep.optim._release import (
    Release as Release,
    ReleaseState as ReleaseState,
    release as release,
)
from halfstep.optim._sharded import sharded as sharded
from halfstep.optim._state import (
    FlashState as FlashState,
    StateError as StateError,
    coded as coded,
    stored_bytes as stored_bytes,
)
from halfstep.optim._transform import (
    ChainState as ChainState,
    Transformation as Transformation,
    chain as chain,
)
