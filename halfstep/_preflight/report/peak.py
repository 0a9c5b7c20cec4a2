"""Say what fills a device's memory at the peak: by role, by layer, by line of the source."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from halfstep._preflight.hlo.buffer_assignment import BufferAssignment, decode
from halfstep._preflight.hlo.buffer_roles import BufferRoles
from halfstep._preflight.hlo.live_buffers import LiveBuffer, LiveBuffers, live_buffers
from halfstep._preflight.hlo.op_names import read
from halfstep._preflight.hlo.program import Instruction
from halfstep._preflight.report.roles import OTHER, Argument

OUTPUTS = "outputs"
CONSTANTS = "constants"
CODE = "program code"

GAPS = "gaps between buffers"
UNLISTED = "counted by the compiler and not listed by it"
UNNAMED = "buffers without a name"

Key = Literal["role", "scope", "source", "array"]


@dataclasses.dataclass(frozen=True)
class PeakBuffer:
    """Memory in use at the peak: buffers of the same role, shape and place in the source.

    Attributes:
        bytes: Bytes of all these buffers on one device, with the padding of their layout.
        count: The number of buffers.
        role: Their purpose: `parameters`, `optimizer state`, `batch` or `other` for an argument,
            else `residuals`, `gradients`, `collective buffers`, `temporaries`, `outputs`,
            `constants` or `program code`.
        array: Dtype and shape of one of them, such as `bfloat16[8,1024]`.
        scope: The `jax.named_scope`s that they are computed in, with `/` between them.
        source: The user's line that computes them, `train.py:12`; empty for an argument, or if the
            program does not say.
        name: JAX's operation that computes them, `dot_general`; the name of an argument.
        instruction: The compiler's instruction that writes them, or one of several.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp

        x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        report = halfstep.preflight(lambda x: jnp.tanh(x) @ x, (x,), targets="h100")
        largest = report["h100"].peak.buffers[0]
        assert largest.array == "float32[1024,1024]" and largest.bytes == 4 * 2**20
        ```
    """

    bytes: int
    count: int
    role: str
    array: str
    scope: str
    source: str
    name: str
    instruction: str

    @property
    def attributed(self) -> bool:
        """Whether it is known which argument, operation or line the memory is for."""
        return bool(self.name or self.source)


@dataclasses.dataclass(frozen=True)
class Peak:
    """The contents of a device's memory at its peak use.

    They come from XLA's buffer assignment, which says where each value of the compiled program lies
    and until when. `sum(buffer.bytes for buffer in buffers) + sum(rest.values()) == bytes`.

    How roles are decided: arguments are `parameters`, `optimizer state`, `batch` or `other` as in
    the rest of the report, also while the step keeps another value in the place of a donated
    argument. Among the values that the step computes,

    - `collective buffers` are written by a collective: an all-gather, a reduce-scatter ...
    - `residuals` are written before the backward pass and read by it: the values that
      `jax.checkpoint` decides about, and also masks and 16-bit copies of weights.
    - `gradients` are written in the backward pass and read outside it, by the update.
    - `outputs` do not take the place of an argument.
    - `temporaries` are everything else: values that one pass both computes and reads, and
      workspaces.

    The backward pass is known by the names that JAX gives to operations under `jax.grad`. So a
    backward pass that is written by hand counts as forward, a sum of gradients over microbatches
    counts as temporary, and a fusion counts by the operation that makes its result. If the compiler
    has merged equal operations, only one of their names is left.

    Attributes:
        bytes: The peak; the entry's `peak_bytes` if it is known.
        buffers: The buffers in memory, the largest first.
        rest: Bytes of the peak that no buffer explains, by reason. On a GPU there are none: the
            buffers add up to XLA:GPU's peak. XLA:TPU's figure of temporaries also includes the gaps
            that it leaves between buffers, and memory that is in no buffer assignment and that it
            does not explain.
        at: The operation that runs at the peak, with its line.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def step(params, batch):
            def loss(params):
                with jax.named_scope("hidden"):
                    hidden = jnp.tanh(batch @ params)
                return jnp.mean(hidden**2)

            return params - 0.1 * jax.grad(loss)(params)


        params = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        batch = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
        report = halfstep.preflight(step, (params, batch), targets="h100", donate_argnums=0)
        peak = report["h100"].peak
        assert peak.attributed > 0.95
        assert peak.by("role")["batch"] == 8192 * 1024 * 4
        assert "hidden" in peak.by("scope")
        ```
    """

    bytes: int
    buffers: tuple[PeakBuffer, ...]
    rest: Mapping[str, int]
    at: str

    @property
    def live_bytes(self) -> int:
        """Bytes of all buffers, with the program's code: the peak without `rest`."""
        return sum(buffer.bytes for buffer in self.buffers)

    @property
    def attributed(self) -> float:
        """The share of the peak whose argument, operation or line is known."""
        known = sum(buffer.bytes for buffer in self.buffers if buffer.attributed)
        return known / self.bytes if self.bytes else 1.0

    @property
    def unattributed(self) -> dict[str, int]:
        """The remaining bytes, by reason: `rest`, and buffers that have neither name nor line."""
        unnamed = sum(buffer.bytes for buffer in self.buffers if not buffer.attributed)
        return {**self.rest, **({UNNAMED: unnamed} if unnamed else {})}

    def by(self, key: Key) -> dict[str, int]:
        """Sum bytes by `"role"`, `"scope"` (layer), `"source"` (line) or `"array"`, the most first.

        Arguments have no scope and no line: their bytes are under `""` there.
        """
        total: Counter[str] = Counter()
        for buffer in self.buffers:
            total[getattr(buffer, key)] += buffer.bytes
        return dict(total.most_common())


def make_peak(
    dumped: bytes,
    arguments: Sequence[Argument],
    *,
    on_tpu: bool,
    peak_bytes: int | None,
    code_bytes: int = 0,
) -> Peak | None:
    """Describe what fills the peak.

    Args:
        dumped: The compiler's buffer assignment.
        arguments: The step's arguments, in the order of the program's.
        on_tpu: Whether the compiler is XLA:TPU.
        peak_bytes: The peak by the compiler's figures, which the result adds up to; `None` if there
            are none.
        code_bytes: The bytes of the program itself, if the peak includes them.

    Returns:
        The peak; `None` if the compiler has not written a buffer assignment, or if it cannot be
        read.
    """
    if not dumped:
        return None
    try:
        assignment = decode(dumped)
        live = live_buffers(assignment, on_tpu=on_tpu)
        buffers = _merged([_described(assignment, live, arguments), _code(code_bytes)])
    # A compiler of another version may write the assignment differently. All other figures are
    # available without it.
    except (ValueError, LookupError):
        return None
    known = sum(buffer.bytes for buffer in buffers)
    # XLA:GPU's peak is that of the live values; on a TPU the whole allocation counts.
    gaps = live.gaps if on_tpu else 0
    total = known + gaps if peak_bytes is None else peak_bytes
    rest = {GAPS: gaps, UNLISTED: total - known - gaps}
    return Peak(
        bytes=total,
        buffers=buffers,
        rest={reason: count for reason, count in rest.items() if count},
        at=_place(assignment, live.at),
    )


def _described(
    assignment: BufferAssignment, live: LiveBuffers, arguments: Sequence[Argument]
) -> list[PeakBuffer]:
    roles = BufferRoles(assignment)
    parameters = {
        node.parameter: node for node in assignment.module.entry if node.opcode == "parameter"
    }
    return [
        _argument(buffer, parameters.get(buffer.parameter), arguments)
        if buffer.kind == "argument"
        else _computed(buffer, roles, arguments)
        for buffer in live.buffers
    ]


def _argument(
    buffer: LiveBuffer, parameter: Instruction | None, arguments: Sequence[Argument]
) -> PeakBuffer:
    given = _given(parameter, arguments)
    label = parameter.op_name if parameter is not None else ""
    return PeakBuffer(
        bytes=buffer.bytes,
        count=1,
        role=OTHER if given is None else given.role,
        array="" if parameter is None else parameter.array(()),
        scope="",
        source="",
        name=label if given is None else given.name,
        instruction="" if parameter is None else parameter.name,
    )


def _given(parameter: Instruction | None, arguments: Sequence[Argument]) -> Argument | None:
    """Find the argument that a parameter of the program stands for.

    JAX leaves out unused arguments, and names the others by their number: `args[7]`.
    """
    digits = "" if parameter is None else parameter.op_name[len("args[") : -1]
    if digits.isdecimal() and int(digits) < len(arguments):
        return arguments[int(digits)]
    return None


def _computed(buffer: LiveBuffer, roles: BufferRoles, arguments: Sequence[Argument]) -> PeakBuffer:
    use = roles.of(buffer.values, returned=buffer.kind == "output")
    lasting = {"output": OUTPUTS, "constant": CONSTANTS}
    made = PeakBuffer(
        bytes=buffer.bytes,
        count=1,
        role=lasting.get(buffer.kind, use.role),
        array=use.array,
        scope="",
        source="",
        name=CONSTANTS if buffer.kind == "constant" else "",
        instruction=use.instruction,
    )
    if use.origin.opcode == "parameter":
        # The buffer is a copy that the compiler has made of an argument.
        given = _given(use.origin, arguments)
        return made if given is None else dataclasses.replace(made, name=given.name)
    origin = read(use.origin.op_name)
    if not origin.operation:
        # Without a name, the line is the one that called the compiler.
        return made
    return dataclasses.replace(
        made, scope=origin.scope, source=use.origin.source, name=origin.operation
    )


def _code(count: int) -> list[PeakBuffer]:
    return [PeakBuffer(count, 1, CODE, "", "", "", CODE, "")] if count else []


def _merged(parts: Sequence[Sequence[PeakBuffer]]) -> tuple[PeakBuffer, ...]:
    """Merge buffers that differ only in the instruction into one row, and sort by size."""
    found: dict[PeakBuffer, list[PeakBuffer]] = {}
    for buffer in (one for part in parts for one in part):
        key = dataclasses.replace(buffer, bytes=0, instruction="")
        found.setdefault(key, []).append(buffer)
    rows = [
        dataclasses.replace(same[0], bytes=sum(one.bytes for one in same), count=len(same))
        for same in found.values()
    ]
    return tuple(sorted(rows, key=lambda one: (-one.bytes, one.role, one.name, one.source)))


def _place(assignment: BufferAssignment, instruction: str) -> str:
    for node in assignment.module.instructions.values():
        if node.name == instruction:
            name = read(node.op_name).operation
            return f"{name} at {node.source}" if name and node.source else name
    return ""
