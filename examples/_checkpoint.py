"""Checkpoints of any pytree with Orbax, exact to the bit, together with the run's options."""

import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

import equinox as eqx
import jax
import orbax.checkpoint as ocp

T = TypeVar("T")


def named_arrays(tree: Any) -> dict[str, jax.Array]:
    """The arrays of a tree by path. What is no array (functions, sizes) the program rebuilds."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(eqx.filter(tree, eqx.is_array))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


class Checkpoints:
    """The last two checkpoints of one run, in one folder. Use it in a `with` statement.

    Args:
        directory: The folder; it is made if it is not there.
        options: The run's options, as JSON can hold them. A checkpoint written with other ones is
            refused, because the run that goes on from it would be neither run.
    """

    def __init__(self, directory: pathlib.Path, options: Mapping[str, Any]):
        self._options = dict(options)
        settings = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(directory.resolve(), options=settings)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, `None` if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Write the arrays of `state`, and return when they are on disk.

        Args:
            step: The number of steps done.
            state: Any pytree. It may be donated to the next step: nothing is read after the return.
        """
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(named_arrays(state)),
            options=ocp.args.JsonSave(self._options),
        )
        self._manager.save(step, args=args)
        self._manager.wait_until_finished()

    def restore(self, step: int, like: T) -> T:
        """Read the state of a step.

        Args:
            step: One that was saved.
            like: A state of the same structure, such as the initial one.

        Raises:
            ValueError: If the checkpoint was written with other options.
        """
        composite = ocp.args.Composite
        saved = self._manager.restore(step, args=composite(options=ocp.args.JsonRestore()))
        options = saved["options"]
        changed = [
            f"{name}={options.get(name)} (now {self._options.get(name)})"
            for name in sorted({*options, *self._options})
            if options.get(name) != self._options.get(name)
        ]
        if changed:
            raise ValueError(
                f"the checkpoints in {self._manager.directory} were written with other options: "
                f"{', '.join(changed)}. Resume with the same ones, or write to another folder."
            )
        wanted = named_arrays(like)
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        restoring = ocp.args.StandardRestore(shapes)
        found = self._manager.restore(step, args=composite(state=restoring))["state"]
        arrays, static = eqx.partition(like, eqx.is_array)
        structure = jax.tree.structure(arrays)
        return eqx.combine(jax.tree.unflatten(structure, [found[name] for name in wanted]), static)
