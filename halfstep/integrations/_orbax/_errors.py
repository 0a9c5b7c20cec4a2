"""Define the errors of checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint that does not fit what was asked for, or a folder that cannot be written to.

    Example:
        ```python
        import jax.numpy as jnp
        import tempfile
        from halfstep.integrations.orbax import CheckpointError, Checkpoints

        with Checkpoints(tempfile.mkdtemp()) as checkpoints:
            checkpoints.save(1, {"w": jnp.ones(3)})
            checkpoints.wait()
            try:
                checkpoints.restore({"w": jnp.ones(3, jnp.bfloat16)})
            except CheckpointError as error:
                message = str(error)
        assert "nothing is cast" in message
        ```
    """


class DamagedCheckpointError(CheckpointError):
    """A step that is incomplete, of another program, or changed since it was written.

    Example:
        ```python
        import jax.numpy as jnp
        import pathlib
        import tempfile
        from halfstep.integrations.orbax import Checkpoints, DamagedCheckpointError

        folder = pathlib.Path(tempfile.mkdtemp())
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(1, {"w": jnp.ones(3)})
            checkpoints.wait()
            (folder / "1" / "state" / "_METADATA").write_text("damaged")
            try:
                checkpoints.restore({"w": jnp.ones(3)}, step=1)
            except DamagedCheckpointError as error:
                message = str(error)
        assert "step 1" in message and "cannot be restored" in message
        ```
    """
