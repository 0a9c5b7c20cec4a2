"""What can be wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint that does not fit what was asked for, or a folder that cannot be written to."""


class DamagedCheckpointError(CheckpointError):
    """A step that is incomplete, of another program, or not what was written."""
