"""Libraries compared by their documentation: who runs where, how fast, since when, with what.

A program on a CPU cannot show on which accelerators a library runs, nor who uses it: these rows
are read from each library's own pages. Every cell has the address of the page that says so, with
the commit that was read. Where the pages do not say, the cell is `not documented`, with the page.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

READ = "2026-11-18"
"""When the pages were read."""
OURS = "halfstep"
ABSENT = "not documented"


@dataclasses.dataclass(frozen=True)
class Said:
    """What a page says, and its address."""

    text: str
    page: str


@dataclasses.dataclass(frozen=True)
class Library:
    """A library, the version that was read, and the page that lists what it has."""

    name: str
    read: str
    page: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table: what is asked, and what each library's pages say."""

    title: str
    cells: Mapping[str, Said]


def _at(repository: str, commit: str, path: str) -> str:
    return f"https://github.com/{repository}/blob/{commit}/{path}"


def _ao(path: str) -> str:
    return _at("pytorch/ao", "36027d82d1ad9949597ea16002ff4940374b1b94", path)


def _te(path: str) -> str:
    return _at("NVIDIA/TransformerEngine", "d0067d0da6cb01811b8072a7d304f0e00344ce2b", path)


def _flax(path: str) -> str:
    return _at("google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0", path)


def _maxtext(path: str) -> str:
    return _at("AI-Hypercomputer/maxtext", "e591f30cbbf217ed67ef71263ec0538239f9c3b8", path)


_MPX_REPOSITORY = "Data-Science-in-Mechanical-Engineering/mixed_precision_for_JAX"
MPX = _at(_MPX_REPOSITORY, "8b5262c2af80480540ce39aca0436e6b638be0d3", "README.md")
MPX_PAPER = _at(_MPX_REPOSITORY, "8b5262c2af80480540ce39aca0436e6b638be0d3", "docs/paper/main.tex")
JMP = _at("google-deepmind/jmp", "9c1cdbbf78da8b2bfaee475d42611c72626e31d0", "README.md")
JAXAMP = _at("acutkosky/jaxamp", "36f958fe862d968c55cd9683e5ea8bdacce867c1", "README.md")
FLASHOPTIM = _at("samacqua/flashoptim-jax", "fc24600d112c5f8018adc3179c5af26ebcc117e2", "README.md")
QWIX = _at("google/qwix", "aa623acb24c418563265fd8d541c1d51fc285269", "README.md")
KERAS = _at("keras-team/keras", "3422977a5e38fb2f7709aaa9a08e47f0c43d0f60", "README.md")
KERAS_POLICY = "https://keras.io/api/mixed_precision/policy"
AMP = _at("pytorch/pytorch", "4e0ff98084d470b85e94fccdca7213f6580b1d5b", "docs/source/amp.md")
CHECKPOINT = _at(
    "pytorch/pytorch", "05382727fd08ac518afece33a69e4bb72c2d2cab", "docs/source/checkpoint.md"
)
ESTIMATION = _at(
    "pytorch/torchtitan",
    "038d5fd1bb3056e3c676d261fd720e1dfbc04bfe",
    "scripts/estimate/estimation.py",
)
ANOMALY = "https://pytorch.org/docs/stable/_modules/torch/autograd/anomaly_mode"
TRAINING = _ao("docs/source/workflows/training.md")
WORKFLOWS = _ao("docs/source/workflows/index.md")
TE = _te("README.rst")
TE_PYTORCH = _te("docs/api/pytorch.rst")
FP8 = _flax("docs/guides/quantization/fp8_basics.md")
MAXTEXT = _maxtext("README.md")
MAXTEXT_TUNING = _maxtext("docs/guides/optimization/benchmark_and_performance.md")
MAXTEXT_CONFIG = _maxtext("src/maxtext/configs/base.yml")
MAXTEXT_TE = _maxtext("tests/end_to_end/gpu/te/README.md")

LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        OURS: Library("halfstep", "0.1.0", "support.md"),
        "mpx": Library("mpx", "commit 8b5262c, 2025-10-26", MPX),
        "jmp": Library("jmp", "commit 9c1cdbb, 2025-01-29", JMP),
        "jaxamp": Library("jaxamp", "commit 36f958f, 2023-11-10", JAXAMP),
        "flashoptim_jax": Library("flashoptim-jax", "commit fc24600, 2026-03-23", FLASHOPTIM),
        "qwix": Library("qwix", "0.1.8, commit aa623ac, 2026-08-13", QWIX),
        "torch_amp": Library("torch.amp", "pytorch commit 4e0ff98", AMP),
        "keras": Library("Keras", "3.16.0, commit 3422977, 2026-08-21", KERAS_POLICY),
        "torchao": Library(
            "PyTorch with torchao", "torchao 0.19.0, commit 36027d8, 2026-08-21", TRAINING
        ),
        "transformer_engine": Library(
            "Transformer Engine", "2.20.0.dev0, commit d0067d0, 2026-08-22", TE
        ),
        "flax_fp8": Library("Flax's fp8", "0.12.8, commit 18f8f31, 2026-07-02", FP8),
        "maxtext": Library("MaxText", "commit e591f30, 2026-08-22", MAXTEXT),
    }
)
"""By name of the probe, where there is one."""

LARGE = (OURS, "torchao", "transformer_engine", "flax_fp8", "maxtext")
"""The columns of the tables of features."""
PROBED = (
    OURS,
    "mpx",
    "jmp",
    "jaxamp",
    "flashoptim_jax",
    "qwix",
    "torch_amp",
    "keras",
)
"""The rows of the table of the libraries that are also probed."""


def _row(title: str, ours: Said, torchao: Said, te: Said, flax: Said, maxtext: Said) -> Row:
    said = (ours, torchao, te, flax, maxtext)
    return Row(title, MappingProxyType(dict(zip(LARGE, said, strict=True))))


EXPERIENCE: tuple[Row, ...] = (
    _row(
        "Hardware it was run on",
        Said("CPUs only; programs for NVIDIA GPUs and TPUs were compiled, never run", "support.md"),
        Said("published results on H100, B200 and MI300X", TRAINING),
        Said("NVIDIA Ampere, Ada, Hopper and Blackwell", TE),
        Said("the guide needs NVIDIA Hopper or later", FP8),
        Said(
            "TPUs and GPUs; published results on v5p and Trillium",
            _maxtext("docs/reference/models/tiering.md"),
        ),
    ),
    _row(
        "Speed measured on accelerators",
        Said("none", "support.md"),
        Said("Llama3-8B on 8 H100: 25 % more tokens per second than bfloat16", TRAINING),
        Said(
            "products of a 5B model, to bfloat16: 1.69x on H200 (fp8), 2.03x on B300 (NVFP4)",
            _te("docs/features/low_precision_training/speedups.rst"),
        ),
        Said(ABSENT, FP8),
        Said(
            "Llama 2 70B on 512 v5p chips: 65.4 % of peak FLOPs",
            _maxtext("docs/reference/models/tiering.md"),
        ),
    ),
    _row(
        "Largest training run shown",
        Said("a small ViT and a small GPT, on CPUs", "training.md"),
        Said("405B parameters on 512 GPUs; validated on up to 2,000 GPUs", TRAINING),
        Said("models of up to 70B parameters, by several teams", TE),
        Said(ABSENT, FP8),
        Said(
            "DeepSeek V3 fine-tuned in fp8 on 2.5 billion tokens",
            _maxtext("docs/reference/core_concepts/quantization.md"),
        ),
    ),
    _row(
        "First commit",
        Said("2026-11; alpha", "support.md"),
        Said(
            "2023-11, for torchao",
            "https://github.com/pytorch/ao/commit/bc092ccd1eb5673282d4816a9a3ca26b395ef0b4",
        ),
        Said(
            "2022-09",
            "https://github.com/NVIDIA/TransformerEngine/commit/"
            "996ea169cf42ba887437760d2001b26812ee95bc",
        ),
        Said(
            "2023-09, for fp8",
            "https://github.com/google/flax/commit/b309c8f25bf8f81027b750b3c984e08f3590cedd",
        ),
        Said(
            "2022-12",
            "https://github.com/AI-Hypercomputer/maxtext/commit/"
            "696b089f888e57a468184d382e56b862985640f2",
        ),
    ),
    _row(
        "Users that it names",
        Said("none", "support.md"),
        Said("TorchTitan, Hugging Face, vLLM, Unsloth, Axolotl and others", _ao("README.md")),
        Said("Megatron-LM, DeepSpeed, Lightning, Accelerate, Levanter and others", TE),
        Said("not named; MaxText imports it", _maxtext("src/maxtext/layers/quantizations.py")),
        Said("not named; NVIDIA reports NVFP4 training with it", TE),
    ),
    _row(
        "Frameworks",
        Said("JAX: Equinox, Linen, NNX and Haiku are tested", "support.md#features-and-frameworks"),
        Said("PyTorch", _ao("README.md")),
        Said("PyTorch and JAX, and a C++ API for others", TE),
        Said("Flax Linen", FP8),
        Said("its own models, in JAX and Flax", MAXTEXT),
    ),
    _row(
        "Kernels of its own",
        Said(
            "optimizers: Mosaic, compiled and never run on a device; products: XLA's, and Mosaic "
            "for one recipe",
            "support.md#optimizers-and-hardware",
        ),
        Said("Triton and CUDA kernels that quantize; products by cuBLAS", TRAINING),
        Said(
            "CUDA kernels for products, attention, norms, activations and more",
            _te("docs/api/c/index.rst"),
        ),
        Said("XLA's fp8 products", FP8),
        Said(
            "Pallas kernels for attention and experts",
            _maxtext("docs/guides/optimization/pallas_kernels_performance.md"),
        ),
    ),
)
"""Rows about experience: halfstep has the least in most of them."""

FEATURES: tuple[Row, ...] = (
    _row(
        "Changes to the model's code",
        Said("none", "autocast.md"),
        Said(
            "none for autocast; `convert_to_float8_training` swaps `nn.Linear` layers",
            _ao("README.md"),
        ),
        Said("the model is built from its layers", TE),
        Said("`dot_general_cls=` in each layer, scales next to the parameters", FP8),
        Said(
            "options of its own models",
            _maxtext("docs/reference/core_concepts/quantization.md"),
        ),
    ),
    _row(
        "fp8 recipes, forward and backward",
        Said("per tensor, delayed, per row, per row with bfloat16 weight gradients", "fp8.md"),
        Said("tensorwise, rowwise, rowwise with high-precision weight gradients", TRAINING),
        Said(
            "current, delayed and blockwise scaling",
            _te("docs/features/low_precision_training/index.rst"),
        ),
        Said("delayed scaling; current scaling by hand", FP8),
        Said(
            "through qwix, or Transformer Engine's recipes",
            MAXTEXT_TE,
        ),
    ),
    _row(
        "MXFP8 and NVFP4",
        Said("rounded as the hardware does, multiplied in bfloat16: no speedup", "fp8.md#recipes"),
        Said("MXFP8 with cuBLAS on B200 (prototype); NVFP4 training planned", WORKFLOWS),
        Said(
            "both, in hardware on Blackwell",
            _te("docs/features/low_precision_training/nvfp4/nvfp4.rst"),
        ),
        Said(ABSENT, FP8),
        Said("both, through Transformer Engine", _maxtext("src/maxtext/configs/types.py")),
    ),
    _row(
        "Loss scaling for float16",
        Said("dynamic, with a verdict that names the parameter", "loss-scaling.md"),
        Said("`GradScaler`", AMP),
        Said(
            f"{ABSENT}; the introduction refers to a paper",
            _te("docs/features/low_precision_training/introduction/introduction.rst"),
        ),
        Said("`DynamicScale`, in the same package", _flax("flax/training/dynamic_scale.py")),
        Said(f"{ABSENT}; the default is bfloat16", MAXTEXT_CONFIG),
    ),
    _row(
        "Optimizer state below float32",
        Said("8-bit moments and a 24-bit master for any Optax optimizer", "optimizers.md"),
        Said("AdamW in 8 bits, 4 bits and fp8; offload to the CPU", _ao("torchao/optim/README.md")),
        Said(
            "`FusedAdam` with moments in 16 or 8 bits",
            _te("transformer_engine/pytorch/optimizers/fused_adam.py"),
        ),
        Said(ABSENT, FP8),
        Said("`mu_dtype`, and state in the host's memory", MAXTEXT_CONFIG),
    ),
    _row(
        "Recomputed, compressed or offloaded activations",
        Said("recompute, 8 or 4 bits, or the host, by rules from outside", "remat-policies.md"),
        Said("`torch.utils.checkpoint`, with selective policies", CHECKPOINT),
        Said("`checkpoint`, and CPU offloading for PyTorch", TE_PYTORCH),
        Said(
            "`nn.remat`, in the same package",
            _flax("docs/api_reference/flax.linen/transformations.rst"),
        ),
        Said("named policies, or recompute and offload per tensor", MAXTEXT_TUNING),
    ),
    _row(
        "Memory without the hardware",
        Said("any JAX step, for NVIDIA GPUs and TPUs, on a CPU", "preflight.md"),
        Said("a script of TorchTitan for FSDP, on a machine with CUDA", ESTIMATION),
        Said(ABSENT, _te("docs/index.rst")),
        Said(ABSENT, FP8),
        Said(
            "its own training step, for TPUs on a CPU, for GPUs on a GPU host",
            _maxtext("docs/guides/monitoring_and_debugging/features_and_diagnostics.md"),
        ),
    ),
    _row(
        "Search for what to recompute",
        Said("`halfstep.plan`, within a budget of bytes", "fit-into-memory.md"),
        Said(
            "`activation_memory_budget` of `torch.compile`, a share from 0 to 1",
            "https://github.com/pytorch/pytorch/pull/185171",
        ),
        Said(ABSENT, TE_PYTORCH),
        Said(ABSENT, FP8),
        Said("`estimator.py`: policy and batch size, by compiling", MAXTEXT_TUNING),
    ),
    _row(
        "Tools for precision and NaNs",
        Said("`explain`, `debug.record`, `debug.first_nonfinite`, `debug.bisect`", "explain.md"),
        Said("`detect_anomaly` names the operation in the backward pass", ANOMALY),
        Said(
            "statistics of each product; products switched to higher precision (PyTorch)",
            _te("docs/debug/1_getting_started.rst"),
        ),
        Said(ABSENT, FP8),
        Said("stops at a NaN loss; can skip spikes", MAXTEXT_CONFIG),
    ),
    _row(
        "Training on many devices",
        Said("by JAX's sharding, run on several CPU devices and processes", "sharding.md"),
        Said("FSDP2 with fp8 all-gathers, tensor parallelism", TRAINING),
        Said("tensor, sequence and context parallelism", TE),
        Said(
            "by JAX's sharding, as all of Flax",
            _flax("docs/guides/parallel_training/flax_on_pjit.md"),
        ),
        Said("up to tens of thousands of chips", MAXTEXT),
    ),
)
"""Rows about features."""

_MPX_FIRST = "7de3aee2ae49739f5120c7a7c5157dc2189409c9"
_COMMITS: Mapping[str, Said] = MappingProxyType(
    {
        OURS: Said("2026-11", "support.md"),
        "mpx": Said("2025-05", f"https://github.com/{_MPX_REPOSITORY}/commit/{_MPX_FIRST}"),
        "jmp": Said(
            "2021-04",
            "https://github.com/google-deepmind/jmp/commit/"
            "9aed1367c2558eec68019940ae1c5ea54592a99f",
        ),
        "jaxamp": Said(
            "2023-10",
            "https://github.com/acutkosky/jaxamp/commit/68d911986524d9008693b3285b80654f1279a154",
        ),
        "flashoptim_jax": Said(
            "2026-03",
            "https://github.com/samacqua/flashoptim-jax/commit/"
            "90a5b34a3cc42e025dda21b3162ac4681e7ccbf4",
        ),
        "qwix": Said(
            "2025-04",
            "https://github.com/google/qwix/commit/62e4c5454de570ec71739aaf4af3929a8f534099",
        ),
        "torch_amp": Said("PyTorch 1.6", "https://docs.pytorch.org/1.6.0/amp.html"),
        "keras": Said(
            "2015-03",
            "https://github.com/keras-team/keras/commit/1f0bd8cac393d7da2e5845b5ffce5f4a8568006f",
        ),
    }
)


def _smaller(title: str, *said: Said) -> Row:
    return Row(title, MappingProxyType(dict(zip(PROBED, said, strict=True))))


SMALLER: tuple[Row, ...] = (
    _smaller(
        "hardware in its documentation",
        Said("CPUs; the rest compiled only", "support.md"),
        Said("RTX 4070, 4 H100", MPX_PAPER),
        Said("GPU, TPU", JMP),
        Said(ABSENT, JAXAMP),
        Said("GPUs; TPU kernels are a next step", FLASHOPTIM),
        Said("CPU, GPU, TPU, LiteRT", QWIX),
        Said("CPU, CUDA, XPU", AMP),
        Said("GPUs and TPUs, by its backends", KERAS),
    ),
    _smaller(
        "speed measured on accelerators",
        Said("none", "support.md"),
        Said("a ViT: 1.7x on RTX 4070, up to 1.57x on 4 H100", MPX_PAPER),
        Said("training time halved on GPU, a third less on TPU", JMP),
        Said(ABSENT, JAXAMP),
        Said("plots of optimizer steps", FLASHOPTIM),
        Said(ABSENT, QWIX),
        Said(ABSENT, AMP),
        Said("benchmarks of its backends", "https://keras.io/getting_started/benchmarks/"),
    ),
    Row("first commit", _COMMITS),
    _smaller(
        "users that it names",
        Said("none", "support.md"),
        Said(ABSENT, MPX),
        Said("Haiku", JMP),
        Said(ABSENT, JAXAMP),
        Said(ABSENT, FLASHOPTIM),
        Said(
            "MaxText names qwix",
            _maxtext("docs/reference/core_concepts/quantization.md"),
        ),
        Said(
            "Lightning builds on it",
            "https://lightning.ai/docs/fabric/2.4.0/_modules/lightning/fabric/plugins/precision/"
            "amp.html",
        ),
        Said("nearly three million developers", KERAS),
    ),
)
"""Columns about the libraries that are probed."""


def unsourced(rows: tuple[Row, ...], libraries: tuple[str, ...]) -> list[str]:
    """Name the cells that are missing, empty or without the address of a page, a line each."""
    lines = []
    for row in rows:
        for library in libraries:
            said = row.cells.get(library)
            if said is None or not said.text.strip():
                lines.append(f"{row.title}, {library}: no statement")
            elif library == OURS and not said.page.partition("#")[0].endswith(".md"):
                lines.append(f"{row.title}, {library}: no page of these docs")
            elif library != OURS and not said.page.startswith("https://"):
                lines.append(f"{row.title}, {library}: no link to a source")
    return lines
