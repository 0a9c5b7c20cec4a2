"""The rows of the comparison: what each probe of a library asks."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Feature:
    """One row."""

    group: str
    title: str
    asked: str
    """What the probe does."""


CASTING = "Casting"
SCALING = "Loss scaling"
BITS = "8 bits and optimizers"
TOOLS = "Tools"


FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        "products": Feature(
            CASTING,
            "An unchanged function multiplies in low precision",
            "Float32 functions with products: plain, and within what the framework has of jitted, "
            "recomputed and looped code. Which products are in 16 bits or fewer?",
        ),
        "carry": Feature(
            CASTING,
            "A loop may begin with float32 zeros",
            "A recurrent network, and a loop whose carry is a product: do they run, and in low "
            "precision?",
        ),
        "branches": Feature(
            CASTING,
            "A branch may return float32 zeros",
            "One branch returns a product, the other one zeros.",
        ),
        "sums": Feature(
            CASTING,
            "Sums and softmax stay in float32",
            "Three losses that overflow where they are computed in float16.",
        ),
        "shared": Feature(
            CASTING,
            "Gradients of shared weights add up in float32",
            "A weight that 4,096 iterations share, each with a gradient of 1.",
        ),
        "leaves": Feature(
            CASTING,
            "Keys, integers and complex numbers stay unchanged",
            "A batch that holds them, given to a loss that uses them.",
        ),
        "statistics": Feature(
            CASTING,
            "Batch statistics stay float32",
            "A running variance of numbers with a standard deviation of 400.",
        ),
        "rules": Feature(
            CASTING,
            "Parts are kept in float32 by a rule, from outside",
            "One operation or layer is kept, and the model is not edited.",
        ),
        "float32_loss": Feature(
            SCALING,
            "The loss is scaled in float32",
            "A loss of 2.21 at a scale of 32,768: their product is beyond float16.",
        ),
        "growth": Feature(
            SCALING,
            "A step in which the scale grows is like any other",
            "Six steps on the same batch; the loss scale grows in some of them.",
        ),
        "bounds": Feature(
            SCALING,
            "The scale has bounds, and recovers",
            "400 bad steps, then good ones; and 400 steps in which the scale can grow.",
        ),
        "skip": Feature(
            SCALING,
            "A bad step changes nothing",
            "AdamW, and one infinite number in the batch; compared bit for bit.",
        ),
        "metric": Feature(
            SCALING,
            "An infinite metric is not an overflow",
            "A metric next to the loss is infinite; loss and gradients are not.",
        ),
        "names_leaf": Feature(
            SCALING,
            "A bad step names the parameter",
            "The gradient of one of two parameters is infinite: what does the step say?",
        ),
        "shards": Feature(
            SCALING,
            "All devices skip together",
            "One device or process of several has an infinite number: do all lower the scale?",
        ),
        "limit": Feature(
            SCALING,
            "A run of bad steps ends with an error",
            "Many skipped steps in a row point to bad data rather than to overflow.",
        ),
        "microbatches": Feature(
            SCALING,
            "A bad microbatch is one skipped step",
            "One of two microbatches of a step is infinite.",
        ),
        "fp8": Feature(
            BITS,
            "Matrix products in 8 bits",
            "The gradient of one layer, as it is traced: what do its products multiply?",
        ),
        "fp8_backward": Feature(
            BITS,
            "Matrix products in 8 bits in the backward pass",
            "The same: two of the three products are those of the backward pass.",
        ),
        "stored_bytes": Feature(
            BITS,
            "Bytes per parameter, with AdamW",
            "Parameters and optimizer state of a matrix of 1024 x 1024.",
        ),
        "release": Feature(
            BITS,
            "Layers are updated in the backward pass",
            "A step that never holds the gradients of all layers at once.",
        ),
        "checkpoint": Feature(
            BITS,
            "State comes back from a checkpoint bit for bit",
            "The library's state in the middle of a run, kept and restored, and steps after it.",
        ),
        "why": Feature(
            TOOLS,
            "Says why an operation is float32",
            "A tool that lists operations, dtypes and reasons.",
        ),
        "bisect": Feature(
            TOOLS,
            "Finds the operations that must stay in float32",
            "A tool that separates the parts which fail in low precision from the others.",
        ),
        "memory": Feature(
            TOOLS,
            "Predicts memory without the hardware",
            "A tool that says how much memory a step takes on an accelerator.",
        ),
        "newest": Feature(
            TOOLS,
            "Runs on JAX 0.10",
            "One step.",
        ),
        "no_device": Feature(
            TOOLS,
            "Importing it starts no device",
            "An import where JAX is told to use a platform that does not exist.",
        ),
    }
)
