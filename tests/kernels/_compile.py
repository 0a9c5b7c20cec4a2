"""Compile updates for hardware that is not there, and print the facts.

`python -m tests.kernels._compile TARGET CASES`: cases are JSON, facts too. In a process of its own,
since a compiler must be told of its environment before JAX is imported, and without
`halfstep.preflight`: what divides kernels among devices is asked in the process that compiles.
"""

import json
import math
import os
import re
import sys
from typing import Any

from tests.preflight._direct import H100, enter

TOPOLOGIES = {
    "v5e": ("v5e:1x1", "v5e:2x2"),
    "v6e": ("v6e:1x1", "v6e:2x2"),
    "v5p": ("v5p:1x1x1", "v5p:2x2x1"),
    "tpu7x": ("tpu7x:1x1x1", "tpu7x:2x2x1"),
}


def facts(target: str, case: dict[str, Any]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    from halfstep._preflight.hlo.analysis import analyze
    from halfstep._preflight.target.targets import parse_target
    from halfstep.kernels.flash_update import Leaf, Scalars, Spec, flash_update
    from halfstep.quant import groups_for
    from tests.preflight._programs import proto_of

    axes, shape = case.get("axes"), tuple(case["shape"])
    count = 1 if axes is None else 4
    on_gpu = is_gpu(target)
    if on_gpu:
        config = H100 if target == "h100" else parse_target(target).gpu_target_config
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x1x{count}"
        )
    elif count == 1:
        topology = topologies.get_topology_desc(
            platform="tpu",
            topology_name=TOPOLOGIES[target][0],
            chips_per_host_bounds=(1, 1, 1),
        )
    else:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target][1])
    mesh = Mesh(np.array(topology.devices[:count]), ("data",))
    own = NamedSharding(mesh, P(*(axes or ())))
    groups = groups_for(shape)
    assert groups is not None

    def array(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding = own) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    scale = groups.scale_shape(shape)
    low = jnp.int16 if case.get("master_bits") == 32 else jnp.int8
    leaf = Leaf(
        array(shape, jnp.bfloat16),
        array(shape, low),
        array(shape, jnp.int8),
        array(scale, jnp.bfloat16),
        array(shape, jnp.uint8),
        array(scale, jnp.bfloat16),
    )
    by = Scalars(*[array((), jnp.float32, NamedSharding(mesh, P()))] * len(Scalars._fields))
    told = own if case.get("told") else None
    step = jax.jit(
        lambda leaf, grad, by: flash_update(
            leaf,
            grad,
            by,
            Spec("adam", groups),
            implementation=case.get("implementation"),
            sharding=told,
        ),
        donate_argnums=0,
    )
    compiled = step.lower(leaf, array(shape, jnp.bfloat16), by).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    program = analyze(proto_of(compiled))
    assert memory is not None
    assert text is not None
    size = math.prod(shape) // count
    code = 0 if on_gpu else memory.generated_code_size_in_bytes
    found = re.findall(r" (all-[a-z]+|collective-[a-z]+|reduce-scatter)[a-z-]*\(", text)
    return {
        "peak": (memory.peak_memory_in_bytes + code) / size,
        "temp": memory.temp_size_in_bytes,
        "collectives": sorted(set(found)),
        "traffic": sum((k.read + k.written) * k.count for k in program.kernels) / size,
        "implementation": "kernel" if re.search(r"mosaic_gpu|tpu_custom_call", text) else "XLA",
    }


def is_gpu(target: str) -> bool:
    return target not in TOPOLOGIES


def main(target: str, cases: str) -> None:
    enter(gpu=is_gpu(target))
    sys.stdout.write(json.dumps([facts(target, case) for case in json.loads(cases)]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
