"""Checkpoints of a whole training state by Orbax: verified, never cast, of many processes.

See `Checkpoints`.
"""

from halfstep.integrations._orbax import (
    CheckpointError as CheckpointError,
    Checkpoints as Checkpoints,
    DamagedCheckpointError as DamagedCheckpointError,
)
