"""Parse targets, such as `"h100:32x8"`: an accelerator and how many there are."""

import dataclasses
import difflib
import math
import re

from halfstep._preflight.target.accelerators import (
    ACCELERATORS,
    Accelerator,
    GpuFigures,
    TpuFigures,
)

# The largest hosts sold with a card of the table have 16 GPUs (A100). A larger number is nearly
# always a total that lacks its second factor.
_GPUS_PER_HOST = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """An accelerator and how many there are.

    Attributes:
        name: The name that was given, in lower case: `"h100:32x8"`.
        accelerator: The accelerator.
        shape: `(hosts, GPUs per host)`, or the shape of a TPU slice in chips.
        sized: Whether a size was given. Without a size the target is one GPU or one chip.
    """

    name: str
    accelerator: Accelerator
    shape: tuple[int, ...]
    sized: bool

    @property
    def devices(self) -> int:
        """The number of JAX devices."""
        figures = self.accelerator.figures
        a_chip = figures.devices_per_chip if isinstance(figures, TpuFigures) else 1
        return math.prod(self.shape) * a_chip

    @property
    def memory_bytes(self) -> int:
        """The memory of one device."""
        return self.accelerator.memory_bytes

    @property
    def gpu_topology(self) -> str:
        """Partitions, hosts and GPUs per host, as XLA's GPU compiler expects them."""
        self._gpu_figures()
        hosts, gpus = self.shape
        return f"1x{hosts}x{gpus}"

    @property
    def gpu_target_config(self) -> str:
        """The card as a text protobuf: XLA's `GpuTargetConfigProto`."""
        figures = self._gpu_figures()
        fields = dataclasses.asdict(figures)
        capability = fields.pop("cuda_compute_capability")
        dnn, runtime = fields.pop("dnn_version"), fields.pop("runtime_version")
        fields |= {
            "memory_bandwidth": int(self.accelerator.bandwidth),
            "l2_cache_size": self.accelerator.cache_bytes,
            "device_memory_size": self.accelerator.memory_bytes,
        }
        info = " ".join(f"{field}: {value}" for field, value in fields.items())
        # XLA once read cuDNN's version next to the device's fields, and now reads it among them.
        info += f' dnn_version: "{".".join(map(str, dnn))}.0"'
        return (
            f"gpu_device_info {{ {info} cuda_compute_capability {{ {_version(capability)} }} }} "
            f'platform_name: "CUDA" dnn_version_info {{ {_version(dnn)} }} '
            f"runtime_version {{ {_version(runtime)} }} "
            f'device_description_str: "{self.accelerator.description}"'
        )

    @property
    def tpu_topology(self) -> str:
        """The slice by libtpu's name, `"v5e:2x2"`."""
        return f"{self._tpu_figures().topology}:{_times(self.shape)}"

    @property
    def tpu_chips_per_host(self) -> tuple[int, int, int] | None:
        """The `chips_per_host_bounds` that libtpu needs for a single chip, else its default."""
        self._tpu_figures()
        return (1, 1, 1) if math.prod(self.shape) == 1 else None

    def _gpu_figures(self) -> GpuFigures:
        if not isinstance(self.accelerator.figures, GpuFigures):
            # Callers ask for the platform first.
            raise ValueError(f"{self.name} is a TPU and has no GPU topology; use `tpu_topology`.")
        return self.accelerator.figures

    def _tpu_figures(self) -> TpuFigures:
        if not isinstance(self.accelerator.figures, TpuFigures):
            # Callers ask for the platform first.
            raise ValueError(f"{self.name} is a GPU and has no TPU topology; use `gpu_topology`.")
        return self.accelerator.figures


def parse_target(text: str | Target) -> Target:
    """Resolve the name of a target.

    Args:
        text: The name of an accelerator, and a size after a colon: `"h100"`, `"h100:8"` (one host
            with 8), `"h100:32x8"` (32 hosts of 8), `"v5e:16x16"`, `"v5p:4x4x4"`. Upper case and
            surrounding blanks do not matter. A `Target` is returned unchanged.

    Returns:
        The target.

    Raises:
        ValueError: If the accelerator is not known, or does not come in that size.
    """
    if isinstance(text, Target):
        return text
    name, colon, size = text.strip().lower().partition(":")
    if name not in ACCELERATORS:
        raise ValueError(_unknown(name))
    accelerator = ACCELERATORS[name]
    if not colon:
        single = (1,) * (accelerator.tpu_dimensions or 2)
        return Target(name=name, accelerator=accelerator, shape=single, sized=False)
    if not re.fullmatch("[0-9]{1,6}(x[0-9]{1,6})*", size):
        raise ValueError(
            f"the size of a target is integers with x between them; got {size!r} in "
            f"{text!r}. Write {_example(accelerator)!r}, say, or {name!r} for a single one."
        )
    numbers = tuple(int(number) for number in size.split("x"))
    given = f"{name}:{_times(numbers)}"
    if 0 in numbers:
        raise ValueError(
            f"every number of a size is at least 1; got {given!r}. Write {name!r} for a single one."
        )
    if isinstance(accelerator.figures, TpuFigures):
        shape = _slice(given, accelerator, accelerator.figures, numbers)
    else:
        shape = _hosts(given, name, numbers)
    return Target(name=given, accelerator=accelerator, shape=shape, sized=True)


def _hosts(given: str, name: str, numbers: tuple[int, ...]) -> tuple[int, ...]:
    if len(numbers) > 2:
        raise ValueError(
            f"the size of a GPU target is GPUs (of one host) or hosts x GPUs of each; got "
            f"{given!r}. Write '{name}:{math.prod(numbers[:-1])}x{numbers[-1]}'."
        )
    hosts, gpus = numbers if len(numbers) == 2 else (1, *numbers)
    if gpus > _GPUS_PER_HOST:
        total = hosts * gpus
        each = max(number for number in range(1, 9) if total % number == 0)
        raise ValueError(
            f"a host has at most {_GPUS_PER_HOST} GPUs; {given!r} asks for {gpus} in one. Write "
            f"hosts x GPUs of each, '{name}:{total // each}x{each}'."
        )
    return hosts, gpus


def _slice(
    given: str, accelerator: Accelerator, figures: TpuFigures, shape: tuple[int, ...]
) -> tuple[int, ...]:
    name = accelerator.name
    if len(shape) != figures.dimensions:
        raise ValueError(
            f"a slice of {name} has {figures.dimensions} dimensions, counted in chips; {given!r} "
            f"has {len(shape)}. Write {_example(accelerator)!r}, say."
        )
    # libtpu refuses a slice that is not made of whole hosts, which hold 2x2 chips.
    if math.prod(shape) > 1 and (shape[0] % 2 or shape[1] % 2):
        whole = tuple(n + n % 2 for n in shape[:2]) + shape[2:]
        raise ValueError(
            f"a slice of {name} is made of hosts with 2x2 chips, so that its first two numbers "
            f"are even; got {given!r}. Write '{name}:{_times(whole)}', or {name!r} for one chip."
        )
    side = figures.longest_side
    if side is not None and max(shape) > side:
        raise ValueError(
            f"a slice of {name} has at most {side} chips on a side; got {given!r}. Write at most "
            f"'{name}:{_times((side,) * figures.dimensions)}'."
        )
    if math.prod(shape) > figures.pod_chips:
        raise ValueError(
            f"a slice of {name} has at most {figures.pod_chips} chips, which is a whole pod; "
            f"{given!r} has {math.prod(shape)}. Write a smaller shape, {_example(accelerator)!r}, "
            "say."
        )
    return shape


def _unknown(name: str) -> str:
    names = ", ".join(map(repr, ACCELERATORS))
    message = f"target: unknown accelerator {name!r}; required one of {names}."
    for known, accelerator in ACCELERATORS.items():
        # "v5e-16", "h100x8": names that clouds use for machines and slices.
        if re.fullmatch(f"{known}[-_ x]+[0-9x]+", name):
            example = _example(accelerator)
            return f"{message} Write its size after a colon, as in {example!r}."
    # Prefixes come before similar names: "v5" is the beginning of several, and all are suggested.
    near = [known for known in ACCELERATORS if name and known.startswith(name)]
    near = near or difflib.get_close_matches(name, ACCELERATORS, n=1)
    return f"{message} Did you mean {' or '.join(map(repr, near))}?" if near else message


def _example(accelerator: Accelerator) -> str:
    sizes = ("32x8", "", "4x4", "4x4x4")
    return f"{accelerator.name}:{sizes[accelerator.tpu_dimensions]}"


def _times(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))


def _version(numbers: tuple[int, ...]) -> str:
    parts = ("major", "minor", "patch")[: len(numbers)]
    return " ".join(f"{part}: {number}" for part, number in zip(parts, numbers, strict=True))
