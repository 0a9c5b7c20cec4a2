"""Compile a case directly, with JAX's own functions and nothing of halfstep's, and print the facts.

`python -m tests.preflight._direct CASE PLATFORM` in an environment in which compilers work.
"""

import base64
import json
import os
import sys

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def enter(*, gpu: bool) -> None:
    """Set what compilers without a device need: written out here, not taken from the package."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0" if gpu else "",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_LOG_DIR": "disabled",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def main(case: str, platform: str) -> None:
    enter(gpu=platform == "cuda")
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tests.preflight import _cases
    from tests.preflight._programs import proto_of

    many = case == "transformer"
    if platform == "cuda":
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H100, topology="1x32x8" if many else "1x1x1"
        )
    elif many:
        topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:16x16")
    else:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1)
        )
    if many:
        mesh = topologies.make_mesh(topology, (256,), ("fsdp",))
        step, args, donated = _cases.transformer(mesh)
    else:
        make = {
            "vit": lambda: _cases.vit(256),
            "vit_mpx": lambda: _cases.vit_mpx(256),
            "small": lambda: _cases.vit(16, blocks=1),
            "tiny": lambda: _cases.classifier(16),
        }[case]
        step, args, donated = make()
        whole = NamedSharding(Mesh(np.array(topology.devices[:1]), ("one",)), PartitionSpec())
        args = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), args
        )
    compiled = jax.jit(step, donate_argnums=donated).lower(*args).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    names = ("argument", "output", "alias", "temp", "generated_code")
    facts = {name: getattr(memory, f"{name}_size_in_bytes") for name in names}
    facts["peak"] = memory.peak_memory_in_bytes
    facts["proto"] = base64.b64encode(proto_of(compiled)).decode()
    sys.stdout.write(json.dumps(facts))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
