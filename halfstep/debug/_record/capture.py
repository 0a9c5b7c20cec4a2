"""Keep the arguments of a bad step, so that it can be run again."""

import concurrent.futures
import json
import os
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from halfstep._base import (
    SHA256,
    DamagedFolderError,
    FlatCall,
    check_files,
    check_nothing_added,
    checked,
    digests,
    flush,
    is_key,
    read_json,
    seal,
    sealed_files,
    type_of,
    without_key_type,
)
from halfstep._training import Verdict, as_predicate

_ARRAYS = "arrays"
_ABOUT = "about.json"
_LARGEST = 2**40
_KEYS = ("fry", "rbg", "threefry2x32", "unsafe_rbg")


class Capture:
    """Saves the arguments of a step whenever its gradients are not finite.

    Call it inside the jitted step. As long as everything is finite, it costs a branch that is not
    taken. Otherwise the arrays are copied to the host, and Orbax writes them in a separate thread
    into `directory/0`, `directory/1` and so on. `load_capture` and the command `halfstep replay`
    read them. With update or skip, what the step was given is also what it returns, and with
    donated arguments this is the only way to keep it. For one process.

    Args:
        directory: Where captures are written; created if it does not exist.
        limit: The maximum number of captures; later bad steps are not saved.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp
        import tempfile

        capture = halfstep.debug.Capture(tempfile.mkdtemp())


        @jax.jit
        def step(w, x):
            grads = jax.grad(lambda w: jnp.sum(jnp.sqrt(x * w)))(w)
            finite = halfstep.all_finite(grads)
            capture(finite, w, x)
            return halfstep.select_tree(finite, w - 0.1 * grads, w)


        w = step(jnp.ones(2), jnp.array([1.0, 4.0]))
        w = step(w, jnp.array([1.0, 0.0]))
        (saved,) = capture.wait()
        kept, x = halfstep.debug.load_capture(saved, w, jnp.zeros(2))
        assert x.tolist() == [1.0, 0.0]
        ```
    """

    @checked
    def __init__(self, directory: str | os.PathLike[str], *, limit: int = 3):
        if limit < 1:
            raise ValueError(f"limit must be at least 1, got {limit}")
        self._directory = pathlib.Path(directory).absolute()
        self._limit = limit
        self._count = 0
        self._lock = threading.Lock()
        # Orbax may run JAX computations, which can deadlock inside a callback of the device.
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "halfstep-capture")
        self._written: list[concurrent.futures.Future[pathlib.Path]] = []

    def __call__(self, finite: Verdict | Bool[Array, ""], *args: Any, **kwargs: Any) -> None:
        """Save the arguments unless everything is finite.

        Args:
            finite: The verdict of the step.
            *args: The arguments of the step: parameters, state, batch, keys.
            **kwargs: The same, by name.
        """
        is_finite = as_predicate(finite)
        if is_finite is None:
            raise ValueError(
                f"the verdict was not computed (its `finite` is {is_finite}), as nothing scales "
                "the loss; ask for it with `check_finite=True` where the gradient is made"
            )
        call = _flat(args, kwargs)
        paths = call.paths
        pairs = zip(paths, call.arrays, strict=True)
        # NumPy has no typed keys: they are stored as integers, with the name of their
        # implementation.
        impls = {path: str(jax.random.key_impl(x)) for path, x in pairs if is_key(x)}
        arrays = [without_key_type(x) for x in call.arrays]

        def save(*values: Any) -> None:
            self._save({path: np.asarray(x) for path, x in zip(paths, values, strict=True)}, impls)

        # The callback is inside the branch, so arrays leave the device only when they are needed.
        jax.lax.cond(
            jnp.asarray(is_finite),
            lambda *_: None,
            lambda *values: jax.debug.callback(save, *values),
            *arrays,
        )

    def wait(self) -> tuple[pathlib.Path, ...]:
        """Wait until everything is written, and return the paths. Raises errors from writing."""
        # Callbacks run on threads of the runtime: the last callback may not have started yet.
        jax.effects_barrier()
        return tuple(written.result() for written in list(self._written))

    def _save(self, arrays: dict[str, np.ndarray], impls: dict[str, str]) -> None:
        with self._lock:
            if self._count >= self._limit:
                return
            number, self._count = self._count, self._count + 1
            # Copied, because the device's memory is reused once this function returns.
            kept = {path: array.copy() for path, array in arrays.items()}
            self._written.append(self._writer.submit(self._write, number, kept, impls))

    def _write(
        self, number: int, arrays: dict[str, np.ndarray], impls: dict[str, str]
    ) -> pathlib.Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        while (path := self._directory / str(number)).exists():
            number += 1  # The capture of an earlier run.
        numbered = {str(at): array for at, array in enumerate(arrays.values())}
        _checkpointer().save(path / _ARRAYS, numbered)
        found = digests(list(arrays.values()))
        about = {"paths": list(arrays), "keys": impls, "digests": found}
        (path / _ABOUT).write_text(json.dumps(about, indent=2) + "\n")
        # The list of hashes comes last: a capture without it is incomplete.
        seal(path, where=path)
        flush(path)
        return path


@checked
def load_capture(directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Load the arguments of a bad step, in place of arguments of the same structure.

    Args:
        directory: One of the numbered directories that `Capture` has written.
        *args: The arguments of the step; arrays may be `jax.ShapeDtypeStruct`. Anything that is not
            an array is taken from here.
        **kwargs: The same, by name.

    Returns:
        The arguments with the arrays of the capture; keyword arguments come after the others.

    Raises:
        ValueError: If the directory is incomplete or damaged, or has other arguments.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp
        import tempfile

        capture = halfstep.debug.Capture(tempfile.mkdtemp())
        x = jnp.array([1.0, 0.0])
        capture(halfstep.all_finite(jnp.log(x)), x)
        (saved,) = capture.wait()
        (again,) = halfstep.debug.load_capture(saved, jnp.zeros(2))
        found = halfstep.debug.first_nonfinite(jnp.log, again)
        assert found.count == 1
        ```
    """
    path = pathlib.Path(directory).absolute()
    if not (path / SHA256.sums).is_file():
        raise ValueError(
            f"`directory`: {path} is not a complete capture: {SHA256.sums} is missing. Give one "
            "of the numbered directories that `debug.Capture` has written"
        )
    call = _flat(args, kwargs)
    try:
        about = _verified(path)
        _check_paths(list(call.paths), about["paths"])
        arrays = _read_arrays(path, about)
    except DamagedFolderError as error:
        raise ValueError(
            f"the capture {path} is damaged: {error}. Give another one, or capture the step again"
        ) from error
    found = []
    for name, like, array in zip(call.paths, call.arrays, arrays, strict=True):
        value = jnp.asarray(array)
        if name in about["keys"]:
            value = jax.random.wrap_key_data(value, impl=about["keys"][name])
        if (value.shape, value.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"{name} must be {type_of(like)} as in the arguments that are "
                f"given; the capture has {type_of(array)}"
            )
        found.append(value)
    given, named = call.given(found)
    return (*given, *named.values())


def _verified(path: pathlib.Path) -> dict[str, Any]:
    """Read what a capture says about itself, after checking that its files are unchanged."""
    listed = sealed_files(path)
    check_nothing_added(path, listed, lambda name: name != SHA256.sums)
    if _ABOUT not in listed:
        raise DamagedFolderError(f"`{_ABOUT}` is missing")
    check_files(path, listed, most=_LARGEST)
    about = read_json(path, _ABOUT)
    fields = {"paths": list, "keys": dict, "digests": list}
    for name, kind in fields.items():
        if not isinstance(about, dict) or not isinstance(about.get(name), kind):
            raise DamagedFolderError(
                f"`{_ABOUT}` must have a field {name!r} of type {kind.__name__}"
            )
    texts = (*about["paths"], *about["keys"], *about["keys"].values(), *about["digests"])
    if not all(isinstance(text, str) for text in texts):
        raise DamagedFolderError(f"`{_ABOUT}` has something else where a text must be")
    if len(about["paths"]) != len(about["digests"]):
        raise DamagedFolderError(f"`{_ABOUT}` has not as many digests as arrays")
    if not set(about["keys"].values()) <= set(_KEYS):
        raise DamagedFolderError(f"`{_ABOUT}` names keys that JAX has not")
    return about


def _read_arrays(path: pathlib.Path, about: dict[str, Any]) -> list[Any]:
    """Read the arrays of a capture, in the order of the arguments."""
    try:
        numbered = _checkpointer().restore(path / _ARRAYS)
        arrays = [numbered[str(at)] for at in range(len(about["paths"]))]
        found = digests(arrays)
    except ModuleNotFoundError:
        raise
    # Orbax may raise anything for files that match their hashes but are not its own.
    except Exception as error:
        raise DamagedFolderError(f"Orbax cannot read it: {error}") from error
    for name, digest, expected in zip(about["paths"], found, about["digests"], strict=True):
        if digest != expected:
            raise DamagedFolderError(f"the bits of {name} are not those that were written")
    return arrays


def _flat(args: Sequence[Any], kwargs: dict[str, Any]) -> FlatCall:
    return FlatCall(lambda *args, **kwargs: None, args, kwargs)


def _check_paths(now: list[str], before: list[str]) -> None:
    if now != before:
        gone = [path for path in before if path not in now][:3]
        come = [path for path in now if path not in before][:3]
        raise ValueError(
            f"the capture is of other arguments: it has {len(before)} arrays and the arguments "
            f"have {len(now)}; only the capture has {gone}, only the arguments have {come}. "
            "Give arguments like those that were captured"
        )


def _checkpointer() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "captures are written by Orbax, which is not installed. Install it with: "
            'pip install "halfstep[orbax]"'
        ) from error
    return ocp.PyTreeCheckpointer()
