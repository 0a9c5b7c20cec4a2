"""Use JAX internals, which no other file does. Where an internal is missing, less is known.

`tests/test_private_jax.py` checks these internals with every tested JAX.
"""

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util
from jax.extend.core import Primitive

# Public as `jax.ad_checkpoint.name_p` since JAX 0.12.
NAME_PRIMITIVE: Primitive = getattr(sys.modules[checkpoint_name.__module__], "name_p")  # noqa: B009
"""The primitive of `jax.ad_checkpoint.checkpoint_name`, which policies are asked about."""
OWN_FOLDER = os.path.join(os.path.dirname(__file__), "")
"""Frames of the files in this folder are not the user's, not even where there are no others."""
_JAX = os.path.join(os.path.dirname(jax.__file__), "")
_BACKWARD = "backward_pass"


@runtime_checkable
class TracebackFrame(Protocol):
    """A frame of JAX's tracebacks."""

    @property
    def file_name(self) -> str: ...
    @property
    def function_name(self) -> str: ...
    @property
    def line_num(self) -> int: ...


@runtime_checkable
class Traceback(Protocol):
    """A traceback, as JAX keeps one for each operation; its class has no public name."""

    @property
    def frames(self) -> Sequence[TracebackFrame]:
        """The frames, the innermost first."""
        ...


@contextlib.contextmanager
def lines_of_backward_functions() -> Generator[None, None, None]:
    """Keep the source lines of operations that are traced in backward functions (`custom_vjp`).

    JAX overwrites these lines with the line of the differentiated call. If JAX changes how it does
    this, the operations keep the line of the call.
    """
    module: Any = sys.modules[source_info_util.current.__module__]
    try:
        before, traceback = module.current, module.xla_client.Traceback.get_traceback
    except AttributeError:
        yield
        return

    def current() -> Any:
        kept, own = before(), traceback()
        return kept.replace(traceback=own) if _is_in_backward_function(own) else kept

    module.current = current
    try:
        yield
    finally:
        module.current = before


def _is_in_backward_function(traceback: Traceback) -> bool:
    """Return whether a frame that is not JAX's is inside JAX's backward pass."""
    inside = outside = False
    for frame in traceback.frames:
        is_jax = frame.file_name.startswith(_JAX)
        if is_jax and _BACKWARD in frame.function_name:
            return outside
        # The innermost frames are ours, up to where JAX asks for the line.
        inside |= is_jax
        outside |= inside and not is_jax
    return False


_COMPILER = os.path.join("jax", "_src", "compiler.py")


def is_compiling(thread: int) -> bool:
    """Return whether a thread is compiling a program at this moment, judged by its stack.

    JAX reports a compile only when it is done, not while it runs. If JAX renames the file of its
    compiler one day, the answer is no.
    """
    # Read by name: Python documents the function, and its underscore says that it is for special
    # uses such as this one.
    frames: dict[int, Any] = getattr(sys, "_current_frames")()  # noqa: B009
    frame = frames.get(thread)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER):
            return True
        frame = frame.f_back
    return False


def answer_partitioner(key: str, mesh: Any, partition: Any, operands: int) -> object:
    """Set how XLA's partitioner divides the custom calls of a name.

    `jax.custom_partitioning` does the same, but only for programs that are lowered and compiled in
    one process, on devices that are known: it names its calls by the address of an object.

    Args:
        key: The name, which is the custom call's `backend_config`.
        mesh: The mesh that the program runs on.
        partition: What `custom_partitioning` calls `partition`.
        operands: How many operands the custom call has.

    Returns:
        An object: the answer is forgotten when nothing refers to it anymore. `None` if JAX has
        changed how it finds answers.
    """
    from jax.experimental import custom_partitioning as public
    from jax.sharding import NamedSharding, PartitionSpec

    module: Any = sys.modules.get(public.custom_partitioning.__module__)
    try:
        answers, make = getattr(module, "_sharding_callbacks"), module._ShardingCallbackInfo  # noqa: B009
        parse = module.sharding_impls.parse_flatten_op_sharding
    except AttributeError:
        return None

    def named(sharding: Any, ndim: int) -> NamedSharding:
        try:
            parts = [] if sharding is None else list(parse(sharding, mesh)[0])
        except Exception:
            # A part of an axis has no name. What is divided like this is gathered.
            parts = []
        return NamedSharding(mesh, PartitionSpec(*parts, *[None] * (ndim - len(parts))))

    # Programs may be lowered for one mesh several times, and compiled later, in any order.
    found = answers.get(key.encode())
    if found is not None:
        return found
    leaf = jax.tree.structure(0)
    context = types.SimpleNamespace(platforms=("cuda",), backend=None)
    ins = jax.tree.structure((0,) * operands)
    made = make(None, partition, named, ins, leaf, None, context, mesh, ())
    answers[key.encode()] = made
    return made


def define_split(primitive: Primitive, rule: Callable[..., tuple[Any, Any, Any]]) -> None:
    """Say how `jax.checkpoint` splits an operation of ours with `jax_remat3`.

    Without the flag JAX asks `jax.interpreters.partial_eval`. If JAX changes how it asks with the
    flag, all of the operation is recomputed.

    Args:
        primitive: The operation, which has one result.
        rule: Given a function that splits other functions, and the operands and parameters. It
            returns the result, what is kept for recomputing it, and the function that recomputes it
            from what is kept and the operands. What `split(func, *values)` returns are the result
            of `func` now, and a function, all of whose leaves are kept, that recomputes it.
    """
    try:
        transform: Any = sys.modules[jax.checkpoint.__module__].remat_transform
        rules: Any = sys.modules[transform.__module__].rules
    except (KeyError, AttributeError):
        return

    def by_trace(trace: Any, *values: Any, **params: Any) -> tuple[Any, Any, Any]:
        rules_of_vjp = {"custom_vjp_rules": trace.custom_vjp_rules}
        split = functools.partial(transform, trace.policy, **rules_of_vjp)
        return rule(split, *values, **params)

    rules[primitive] = by_trace
