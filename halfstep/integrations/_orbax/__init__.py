"""Save a whole training state with Orbax; see `halfstep.integrations.orbax`."""

from halfstep.integrations._orbax._checkpoints import (
    Checkpoints as Checkpoints,
)
from halfstep.integrations._orbax._errors import (
    CheckpointError as CheckpointError,
    DamagedCheckpointError as DamagedCheckpointError,
)
