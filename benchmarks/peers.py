"""What other libraries for mixed precision do, and do not: probes of each, in its own environment.

    python -m benchmarks.peers --json FILE

mpx, jmp, jaxamp, flashoptim-jax, qwix, torch.amp and Keras are installed by `uv` with exact
versions, each apart from the others. The probes are small programs that look at results; halfstep
is probed by the same ones. The exit status is 1 if a probe itself fails. Nothing is timed.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

from benchmarks import _environments
from benchmarks._comparison import text
from benchmarks._environments import MissingEnvironmentError
from benchmarks._features import FEATURES
from benchmarks._report import parser, report, write

MODULE = "benchmarks.peers"
OURS = "halfstep"
PEERS: Mapping[str, str] = MappingProxyType(
    {
        OURS: "halfstep",
        "mpx": "mpx",
        "jmp": "jmp",
        "jaxamp": "jaxamp",
        "flashoptim_jax": "flashoptim-jax",
        "qwix": "qwix",
        "torch_amp": "torch.amp",
        "keras": "Keras",
    }
)
ELSEWHERE: Mapping[str, tuple[str, str]] = MappingProxyType({"jaxamp": ("jaxamp_newest", "newest")})
"""A probe that has another environment than the others of its library."""
# XLA:CPU may otherwise compute 16 bits in float32 and leave out the rounding in between.
SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_allow_excess_precision=false",
        "JAX_PLATFORMS": "cpu",
    }
)


def probe(name: str, *, cache: pathlib.Path = _environments.CACHE) -> dict[str, Any]:
    """What one library's probes found, or why they were not run."""
    module = f"benchmarks._peers.{name}"
    if name == OURS:
        return _environments.run_with(sys.executable, module, settings=SETTINGS)
    try:
        made = _environments.run(name, module, settings=SETTINGS, cache=cache)
        if name in ELSEWHERE:
            other, feature = ELSEWHERE[name]
            again = _environments.run(other, module, [feature], settings=SETTINGS, cache=cache)
            made["found"][feature] = again["found"][feature]
    except MissingEnvironmentError as error:
        return {"not_run": str(error)}
    return made


def failures(peers: Mapping[str, Any]) -> list[str]:
    """Probes that failed, or are not there."""
    return [
        f"{name}, {feature}: {found[feature]['evidence'] if feature in found else 'no probe'}"
        for name, peer in peers.items()
        if (found := peer.get("found")) is not None
        for feature in FEATURES
        if feature not in found or found[feature]["answer"] == "error"
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--only", action="append", choices=list(PEERS), help="this library")
    parsed = options.parse_args(argv)
    peers: dict[str, Any] = {}
    bar = tqdm(parsed.only or PEERS, desc="probe", unit="library")
    for name in bar:
        bar.set_postfix_str(name)
        peers[name] = {"name": PEERS[name], **probe(name)}
    made = report(MODULE, {"peers": peers}, packages=())
    write(made, parsed.json)
    if parsed.json != "-":
        print(text(made))
    return made


if __name__ == "__main__":
    failed = failures(main()["peers"])
    for line in failed:
        print(line, file=sys.stderr)
    sys.exit(1 if failed else 0)
