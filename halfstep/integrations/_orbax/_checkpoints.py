"""Save and restore the steps of one run."""

import operator
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from halfstep._base import (
    DamagedFolderError,
    agree,
    checked,
    checked_but,
    digests,
    first_says,
    flush_one,
    gather_texts,
    hash_text,
    is_in_file_system,
    prepare_digests,
    type_of,
    wait_for_all,
)
from halfstep.integrations._orbax import _data, _files
from halfstep.integrations._orbax._errors import CheckpointError, DamagedCheckpointError
from halfstep.integrations._orbax._json_values import encoded
from halfstep.integrations._orbax._leaves import (
    StateLeaf,
    as_python,
    check_leaves,
    empty,
    finished,
    is_empty,
    is_local,
    leaves_of,
    restore_args,
    stored_form,
)
from halfstep.integrations._orbax._lock import WriterLock
from halfstep.integrations._orbax._manifest import Manifest
from halfstep.integrations._orbax._static import static_fields, with_static_fields
from halfstep.integrations._orbax._verification import looks_complete, read_data, verified

T = TypeVar("T")
_STATE, _ABOUT = _files.STATE, _files.ABOUT
_SHORTEST_KEY = 16
_FILE_BYTES = 2**27
"""About how large files of arrays become: a file is hashed by one thread, and Orbax would write one
file of most arrays."""


class _PendingDigests:
    """The digests of arrays, started once: by `start`, or by whoever needs them before."""

    def __init__(self, arrays: list[Any]):
        self._begin = prepare_digests(arrays)
        self._lock = threading.Lock()
        self._wait: Callable[[], list[str]] | None = None

    def start(self) -> Callable[[], list[str]]:
        """Let the devices compute them, and let go of the arrays."""
        with self._lock:
            if self._wait is None:
                self._wait = self._begin()
            return self._wait

    def finish(self) -> list[str]:
        """Wait for them."""
        return self.start()()


class Checkpoints:
    """The checkpoints of one run, in one folder, written by Orbax. Use it in a `with` statement.

    A state is any pytree: modules, optimizer state in low precision, loss scaling, a
    recipe's state, the ledger, PRNG keys. Each step also has the dtype, shape and a digest of every
    leaf, and a hash of every file. `restore` verifies all of them, casts nothing, and passes over
    steps that are damaged. With several processes, all of them make the same calls.

    Args:
        directory: The folder; it is made if it is not there. All processes must see it.
        keep: How many steps are kept; older ones are deleted.
        options: The run's options: numbers, texts, and lists, tuples or dictionaries of them.
            `restore` refuses a step that was written with other ones, because the run that goes on
            from it would be neither run.
        key: Signs each step (HMAC with SHA-256), and `restore` takes only steps that were signed
            with it. Without a key, hashes find damage, and not a person who writes them anew.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp
        import tempfile
        from halfstep.integrations.orbax import Checkpoints

        state = {"w": jnp.arange(3.0), "ledger": halfstep.Ledger()}
        with Checkpoints(tempfile.mkdtemp(), keep=2) as checkpoints:
            for step in (10, 20, 30):
                state = {**state, "ledger": state["ledger"].record(True)}
                checkpoints.save(step, state)
            checkpoints.wait()
            assert checkpoints.steps() == [20, 30]
            fresh = {"w": jnp.zeros(3), "ledger": halfstep.Ledger()}
            step, restored = checkpoints.restore(fresh)
        assert step == 30
        assert restored["ledger"].applied == 3
        ```
    """

    @checked_but("key")
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        options: Mapping[str, Any] | None = None,
        key: bytes | None = None,
    ):
        if keep < 1:
            raise ValueError(f"`keep` must be an integer, 1 or more; got {keep}.")
        if key is not None and (type(key) is not bytes or len(key) < _SHORTEST_KEY):
            raise ValueError(
                f"`key` must be {_SHORTEST_KEY} bytes or more, as secrets.token_bytes(32) makes "
                f"them; got {type(key).__name__}{f' of {len(key)}' if type(key) is bytes else ''}."
            )
        self._directory = epath.Path(directory).absolute()
        self._options = None if options is None else dict(options)
        self._key = key
        # Refuse options that cannot be written now, and not after the first hour of training.
        encoded(self._options, "`options`")
        self._lock = WriterLock(self._directory)
        self._last: int | None = None
        self._passed_over: set[int] = set()
        self._is_writer = False
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        arrays, about = ocp.PyTreeCheckpointHandler(), _files.AboutHandler(key)
        # In this order: files are hashed when the arrays are all there.
        registry.add(_STATE, ocp.args.PyTreeSave, arrays)
        registry.add(_STATE, ocp.args.PyTreeRestore, arrays)
        registry.add(_ABOUT, _files.SaveAbout, about)
        registry.add(_ABOUT, _files.RestoreAbout, about)
        # Lightweight: Orbax would otherwise read a file of each step here, before it is verified.
        settings = ocp.CheckpointManagerOptions(max_to_keep=keep, lightweight_initialize=True)
        self._manager = ocp.CheckpointManager(
            self._directory, options=settings, handler_registry=registry
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._manager.close()
            self._flush_names()
        except Exception:
            # The user has to see the first error.
            if error is None:
                raise
        finally:
            self._lock.release()

    def steps(self) -> list[int]:
        """List the complete steps, oldest first. Files are not read: `restore` does that."""
        found = (step for step in self._listed() if looks_complete(self._path(step)))
        return sorted(found)

    def latest(self) -> int | None:
        """Return the newest complete step, or `None` if there is none."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Return once the step that is being written is complete."""
        self._manager.wait_until_finished()
        self._flush_names()

    @checked
    def save(self, step: int, state: Any, data: _data.Iterator | None = None) -> None:
        """Write a step. It returns as soon as the state may change or be donated.

        The rest is written by a thread; the step appears in the folder at once, when all of it is
        there. The next `save`, `wait` and the end of the `with` wait for it, and raise what went
        wrong.

        Args:
            step: The number of steps done, larger than that of the last one saved or restored.
            state: Any pytree. Arrays, PRNG keys, Python's numbers and texts are saved; of other
                leaves, such as functions, only that they are there.
            data: A data iterator whose place is saved too: Grain's, or any with `get_state` and
                `set_state`. Each process gives its own.

        Raises:
            CheckpointError: If the folder holds steps of another run, another run writes to it,
                it cannot be written to, or a value would not come back as it is.
            TypeError: If `step` is not an integer.
        """
        try:
            # Also one of NumPy's, which could not be written down.
            step = operator.index(step)
        except TypeError as error:
            raise TypeError(
                f"`step` must be an integer; got {type(step).__name__}. Write save(step, state)."
            ) from error
        leaves = leaves_of(state)
        self._begin_writing(step)
        arrays = [leaf for leaf in leaves if leaf.kind in ("array", "key")]
        forms = {leaf.name: stored_form(leaf) for leaf in arrays}
        about = {leaf.name: leaf.about() for leaf in leaves}
        manifest = Manifest(step, jax.process_count(), self._options, about, static_fields(state))
        self._check_room(manifest.array_bytes)
        pending = _PendingDigests(list(forms.values()))
        local = [leaf for leaf in arrays if is_local(leaf)]
        if jax.process_count() > 1 and local:
            # Only process 0 writes what each process has of its own; if they differ, a restart
            # would continue another run than the one that was stopped.
            self._check_processes_agree(local, dict(zip(forms, pending.finish(), strict=True)))

        # The names alone: what waits for the digests must not keep the arrays.
        names = list(forms)

        def text() -> str:
            for name, digest in zip(names, pending.finish(), strict=True):
                about[name]["digest"] = digest
            return manifest.text()

        kept = {name: form for name, form in forms.items() if not is_empty(about[name])}
        items: dict[str, Any] = {}
        if kept:
            items[_STATE] = ocp.args.PyTreeSave(kept, ocdbt_target_data_file_size=_FILE_BYTES)
        place = None if data is None else _data.state_of(data)
        items[_ABOUT] = _files.SaveAbout(text, place)
        # `force`: Orbax has rules of its own for which steps to skip, and here the caller decides.
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        # After Orbax has what it needs, for which the caller waits, and before the caller may
        # donate the arrays.
        pending.start()
        self._last = step

    @checked
    def restore(
        self, like: T, step: int | None = None, data: _data.Iterator | None = None
    ) -> tuple[int, T]:
        """Read a step and verify it.

        Args:
            like: A state of the same structure, such as the initial one, or one whose arrays are
                `jax.ShapeDtypeStruct`, with a sharding each. Arrays come back in its dtypes and on
                its shardings, whatever mesh and however many processes wrote them. Leaves that are
                not stored are taken from it.
            step: Which; without it the newest good one. Those that are damaged are passed over
                with a warning.
            data: The data iterator that goes where the saved one was.

        Returns:
            The step, and the state with the structure and the shardings of `like`.

        Raises:
            CheckpointError: If `like`, the options or the data iterator do not fit.
            DamagedCheckpointError: If the step is damaged, or every step is.
            FileNotFoundError: If there is none.
        """
        leaves = leaves_of(like)
        listed = sorted(self._listed(), reverse=True)
        if not listed:
            raise FileNotFoundError(
                f"there is no step in {self._directory}. Save one first, or give the folder of "
                "a run."
            )
        if step is not None:
            reason, state = self._read(step, like, leaves)
            if reason is not None:
                others = ", ".join(str(other) for other in listed if other != step) or "none"
                raise DamagedCheckpointError(
                    f"step {step} in {self._directory} cannot be restored: {reason}. Leave `step` "
                    f"out to take the newest good one; other steps there: {others}."
                )
            return self._go_on_from(step, state, data)
        reasons = []
        for candidate in listed:
            reason, state = self._read(candidate, like, leaves)
            if reason is None:
                return self._go_on_from(candidate, state, data)
            self._passed_over.add(candidate)
            reasons.append(f"step {candidate}: {reason}")
            if jax.process_index() == 0:
                warnings.warn(
                    f"step {candidate} in {self._directory} is passed over: {reason}. Put a copy "
                    "that is whole in its place, or go on from an earlier step, as is done now.",
                    stacklevel=2,
                )
        raise DamagedCheckpointError(
            f"no step in {self._directory} can be restored. {'; '.join(reasons)}. Start anew in "
            "another folder, or put a copy of a good step there."
        )

    def _path(self, step: int) -> epath.Path:
        return self._directory / str(step)

    def _listed(self) -> list[int]:
        """All folders that are named like a step, as process 0 sees them."""
        found = _files.numbered(self._directory)
        said = first_says(" ".join(map(str, found)))
        return [int(step) for step in said.split()]

    def _go_on_from(self, step: int, state: T, data: _data.Iterator | None) -> tuple[int, T]:
        if data is not None:
            try:
                _data.set_state(data, read_data(self._path(step)))
            except DamagedFolderError as error:
                raise DamagedCheckpointError(
                    f"the place in the data of step {step} in {self._directory} cannot be "
                    f"restored: {error}. Leave `data` out, and say yourself where the data goes on."
                ) from error
            except FileNotFoundError:
                raise CheckpointError(
                    f"step {step} in {self._directory} was saved without a data iterator. Leave "
                    "`data` out, and say yourself where the data goes on."
                ) from None
        self._last = step
        return step, state

    def _read(self, step: int, like: object, leaves: list[StateLeaf]) -> tuple[str | None, Any]:
        """Why a step cannot be used, and otherwise what it holds."""
        path, folder = self._path(step), str(self._directory)
        manifest, own, error = None, None, None
        part, parts = jax.process_index(), jax.process_count()
        try:
            manifest = verified(path, step, part=part, parts=parts, key=self._key)
        except DamagedFolderError as damage:
            own = str(damage)
        except CheckpointError as caught:
            error = caught
        # All processes agree after each stage, before the next collective: see `agree`.
        unreadable = agree(None if error is None else str(error))
        if unreadable is not None:
            raise CheckpointError(unreadable) from error
        reason = agree(own)
        if reason is not None or manifest is None:
            return reason, None
        about = manifest.leaves
        if self._options is not None:
            _check_options(self._options, manifest.options or {}, step, folder)
        check_leaves(leaves, about, step, folder)
        try:
            whole = with_static_fields(like, manifest.static, step)
        except DamagedFolderError as error:
            # All processes read the same manifest, and find the same.
            return str(error), None
        arrays = [leaf for leaf in leaves if leaf.kind in ("array", "key")]
        forms, reason = self._read_arrays(step, arrays, about)
        reason = agree(reason)
        if reason is None:
            reason = agree(_wrong_digest(forms, about))
        if reason is not None:
            return reason, None
        values = [
            finished(leaf, forms[leaf.name])
            if leaf.name in forms
            else as_python(about[leaf.name])
            if leaf.kind == "value"
            else leaf.value
            for leaf in leaves
        ]
        return None, jax.tree.unflatten(jax.tree.structure(whole), values)

    def _read_arrays(
        self, step: int, leaves: list[StateLeaf], about: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, Any], str | None]:
        wanted = [leaf for leaf in leaves if not is_empty(about[leaf.name])]
        found: dict[str, Any] = {}
        if wanted:
            reading = ocp.args.PyTreeRestore(
                # Orbax takes the structure from it; values come from `restore_args`.
                item={leaf.name: 0 for leaf in wanted},
                restore_args={leaf.name: restore_args(leaf) for leaf in wanted},
            )
            try:
                args = ocp.args.Composite(**{_STATE: reading})
                found = dict(self._manager.restore(step, args=args)[_STATE])
            # Whatever Orbax raises on damaged files, which is not documented, an older step may be
            # good.
            except Exception as error:
                return {}, f"Orbax cannot read it: {error}"
        forms = {leaf.name: found.get(leaf.name) for leaf in wanted}
        for leaf in leaves:
            if leaf.name not in forms:
                forms[leaf.name] = empty(about[leaf.name])
        return forms, None

    def _begin_writing(self, step: int) -> None:
        if self._last is not None and step <= self._last:
            raise CheckpointError(
                f"steps must grow: step {step} comes after {self._last}, which was saved or "
                "restored before it."
            )
        if self._is_writer:
            return
        self._become_writer()
        after = -1 if self._last is None else self._last
        # A folder that has later steps than those this run began from belongs to another run, whose
        # steps Orbax would count and delete as its own.
        newer = [found for found in self._listed() if found > after]
        bad = [n for n in newer if n in self._passed_over or not looks_complete(self._path(n))]
        good = sorted(set(newer) - set(bad))
        if good:
            raise CheckpointError(
                f"{self._directory} holds step {good[-1]} already, from another run. Restore it "
                "and go on from there, delete the steps after the one that was restored, or write "
                "to another folder."
            )
        if jax.process_index() == 0:
            # Orbax reads a file of each step that is left, whose hash nobody has.
            left = sorted(set(_files.numbered(self._directory)) - set(bad))
            harmful = [n for n in left if _is_harmful(self._path(n))]
            _files.set_aside(self._directory, [*bad, *harmful])
            _files.remove_unfinished(self._directory)
        wait_for_all("halfstep.integrations.orbax: begin writing")
        # Orbax lists the steps once, when the manager is made.
        self._manager.reload()
        self._is_writer = True

    def _become_writer(self) -> None:
        """Take the lock, on process 0."""
        holder, reason = None, None
        if jax.process_index() == 0:
            reason = _files.why_not_writable(self._directory)
            holder = self._lock.acquire() if reason is None else None
        self._refuse(agree(reason))
        holder = agree(holder)
        if holder is not None:
            raise CheckpointError(
                f"{self._directory} is written to by {holder}. Two runs would delete each other's "
                "steps. Wait for its end, or write to another folder."
            )

    def _check_room(self, needed: int) -> None:
        is_first = jax.process_index() == 0
        reason = _files.why_no_room(self._directory, needed) if is_first else None
        self._refuse(agree(reason))

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise CheckpointError(
                f"nothing was saved to {self._directory}: {reason}. Make room, keep fewer steps "
                "(keep=), or write to another folder."
            )

    def _flush_names(self) -> None:
        """Return once the names of complete steps are on the disk."""
        if self._is_writer and jax.process_index() == 0 and is_in_file_system(self._directory):
            flush_one(self._directory)

    def _check_processes_agree(self, leaves: list[StateLeaf], found: dict[str, str]) -> None:
        # One digest of all digests first: leaf by leaf only when there is something to be found.
        said = gather_texts(hash_text("".join(found[leaf.name] for leaf in leaves)))
        if len(set(said)) == 1:
            return
        for leaf in leaves:
            said = gather_texts(found[leaf.name])
            if len(set(said)) > 1:
                raise CheckpointError(
                    f"`{leaf.name}` is an array of each process's own, and differs between them: "
                    f"{', '.join(said)}. Make it one array over all processes, with a sharding "
                    "over the mesh, or leave it out of the state."
                )


def _is_harmful(step: epath.Path) -> bool:
    try:
        _files.check_unsealed(step)
    except DamagedFolderError:
        return True
    return False


def _wrong_digest(forms: dict[str, Any], about: dict[str, dict[str, Any]]) -> str | None:
    for (name, form), digest in zip(forms.items(), digests(list(forms.values())), strict=True):
        stored = about[name]
        if [str(form.dtype), list(form.shape)] != [stored["dtype"], stored["shape"]]:
            return f"`{name}` is {type_of(form)}, which is not what was written"
        if digest != stored["digest"]:
            return f"the bits of `{name}` are not those that were written"
    return None


def _check_options(
    now: Mapping[str, Any], saved: Mapping[str, Any], step: int, folder: str
) -> None:
    """Raise if the step was written with other options.

    Raises:
        CheckpointError: It lists those that differ.
    """
    changed = [
        f"{name}={saved.get(name)} (now {now.get(name)})"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name)
    ]
    if changed:
        raise CheckpointError(
            f"step {step} in {folder} was written with other options: {', '.join(changed)}. Resume "
            "with the same ones, or write to another folder."
        )
