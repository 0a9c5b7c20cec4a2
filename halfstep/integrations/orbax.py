"""Save a whole training state with Orbax: verified, never cast, from many processes.

See `Checkpoints`.
"""

from halfstep.integrations._orbax import (
    CheckpointError as CheckpointError,
    Checkpoints as Checkpoints,
    DamagedCheckpointError as DamagedCheckpointError,
)
