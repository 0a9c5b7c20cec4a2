"""Compile one program for hardware that is not there, in a process of its own.

`compiler.py` runs this file as a script with a folder as its argument. The script imports nothing
but JAX: the environment in which the compilers work (platforms, flags, libtpu's lock) is not
suitable for computing. The script reads `request.json` and `program.bin` and writes `answer.json`,
`program.hlo.gz` and `program.pb.gz`. Only numbers and the optimized program come back, as text for
people and as a message `xla.HloProto` with the compiler's buffer assignment: nothing that would be
executed.
"""

import gzip
import json
import os
import pathlib
import shutil
import sys
import threading
import traceback
from typing import Any

# The names in `memory_analysis`. The version of jaxlib and the compiler decide which of them are
# there, so each one is looked up.
_MEMORY = (
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "generated_code_size_in_bytes",
    "peak_memory_in_bytes",
    "host_argument_size_in_bytes",
    "host_output_size_in_bytes",
    "host_temp_size_in_bytes",
)


def die_with_parent(folder: pathlib.Path) -> None:
    """End this process and remove its folder when its parent is gone, however the parent ended."""

    def watch() -> None:
        # The parent holds the other end of standard input and never writes to it.
        sys.stdin.buffer.read()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def topology(request: dict[str, Any]) -> Any:
    """Return the devices to compile for."""
    from jax.experimental import topologies

    if request["platform"] == "cuda":
        return topologies.get_topology_desc(
            platform="cuda", target_config=request["target_config"], topology=request["topology"]
        )
    # libtpu assumes that a host has 2x2 chips, and refuses a slice of one chip unless it is told
    # that the host has one chip.
    chips = request["chips_per_host"]
    bounds = {} if chips is None else {"chips_per_host_bounds": tuple(chips)}
    return topologies.get_topology_desc(platform="tpu", topology_name=request["topology"], **bounds)


def answer_partitioner(mesh: Any) -> list[object]:
    """Set how products of blocks are divided over a mesh, and return what has to be kept alive.

    XLA's partitioner asks while it compiles. The functions that answer need nothing but JAX, and
    their files are loaded without the rest of the package.
    """
    import functools

    package = pathlib.Path(__file__).parents[2]
    shards = _loaded(package / "_autocast" / "f8" / "shards.py")
    private = _loaded(package / "_base" / "private_jax.py")
    sizes = shards.refined(tuple(mesh.shape.values()))
    return [
        private.answer_partitioner(
            shards.key(sizes, out),
            shards.mesh_of(sizes),
            functools.partial(shards.partition, out),
            4,
        )
        for out in shards.RESULTS
    ]


def _loaded(file: pathlib.Path) -> Any:
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"halfstep_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is a file of this package, and cannot be loaded.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up the module that they are defined in.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compile_program(request: dict[str, Any], program: bytes) -> tuple[dict[str, Any], Any]:
    """Return the compiler's figures, and the compiled program."""
    import jax
    import numpy as np
    from jax import export
    from jax.experimental import mesh_utils
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    exported = export.deserialize(bytearray(program))
    described = topology(request)
    if request["axes"]:
        names, sizes = zip(*request["axes"], strict=True)
        # As `jax.make_mesh` does on the hardware: 64x4 over 16x16 chips splits an axis of the
        # chips.
        devices = mesh_utils.create_device_mesh(
            sizes, list(described.devices), allow_split_physical_axes=True
        )
        types = tuple(AxisType[name] for name in request["axis_types"])
        mesh = Mesh(devices, names, axis_types=types)
        shardings = exported.in_shardings_jax(mesh)
    else:
        # The smallest topology of a TPU may have several devices; a step without a mesh runs on
        # one.
        mesh = Mesh(np.array(described.devices[:1]), ("device",))
        shardings = (None,) * len(exported.in_avals)
    whole = NamedSharding(mesh, PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or whole)
        for aval, sharding in zip(exported.in_avals, shardings, strict=True)
    ]
    # Donation is set here, by the positions of flat arrays: the program was exported from a
    # function that donates nothing.
    kept = answer_partitioner(mesh) if request["platform"] == "cuda" else []
    jitted = jax.jit(exported.call, donate_argnums=tuple(request["donated"]))
    compiled = jitted.lower(*arguments).compile()
    del kept
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    # XLA:GPU returns `None` without a GPU, and some versions of JAX return a list with one
    # dictionary per program.
    if isinstance(cost, list | tuple):
        cost = cost[0] if cost else {}
    answer = {
        "memory": {name: getattr(memory, name) for name in _MEMORY if hasattr(memory, name)},
        "estimates": {key: float(cost[key]) for key in ("flops", "bytes accessed") if key in cost},
        "device_kind": described.devices[0].device_kind,
        "platform_version": str(getattr(described, "platform_version", "")),
    }
    return answer, compiled


def optimized(folder: pathlib.Path, compiled: Any) -> bytes:
    """Return the optimized program as a message `xla.HloProto`; empty if there is none.

    The compiler dumps it with the buffer assignment, for which executables have a field that
    neither compiler fills without a device. Without a dump, it is the executable's program alone.
    """
    files = folder.glob("dump/*jit_call*after_optimizations.hlo.pb")
    dumped = max((file.read_bytes() for file in files), key=len, default=b"")
    if dumped or compiled is None:
        return dumped
    try:
        module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    # Each platform raises an error of its own if its executables do not keep their program.
    except Exception:
        return b""
    # Field 1 of the message, whose length is in groups of seven bits, the lowest first.
    groups, rest = [0x0A], len(module)
    while rest > 0x7F:
        groups, rest = [*groups, rest & 0x7F | 0x80], rest >> 7
    return bytes([*groups, rest]) + module


def main(folder: pathlib.Path) -> None:
    """Answer the request in a folder."""
    die_with_parent(folder)
    request = json.loads((folder / "request.json").read_text())
    compiled = None
    try:
        answer, compiled = compile_program(request, (folder / "program.bin").read_bytes())
    except Exception as error:
        answer = {
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
    with gzip.open(folder / "program.hlo.gz", "wt", compresslevel=1) as file:
        file.write("" if compiled is None else compiled.as_text() or "")
    # XLA:TPU also dumps a program that is too large for the device's memory.
    with gzip.open(folder / "program.pb.gz", "wb", compresslevel=1) as file:
        file.write(optimized(folder, compiled))
    partial = folder / "answer.json.partial"
    partial.write_text(json.dumps(answer))
    # The rename comes last and is atomic: an answer that is there is complete.
    partial.rename(folder / "answer.json")
    # The answer is on disk, so do not wait for the compilers to clean up their memory.
    os._exit(0)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
