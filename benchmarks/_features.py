"""What libraries for mixed precision are compared by, and the tests that say what halfstep does."""

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
    tests: tuple[str, ...]
    """Of halfstep, as pytest names them."""


CASTING = "Casting"
SCALING = "Loss scaling"
BITS = "8 bits and optimizers"
TOOLS = "Tools"

PROBES = "tests/conformance/test_probes.py"
NUMERICS = "tests/conformance/test_numerics.py"
DYNAMIC = "tests/conformance/test_scalings.py::TestDynamic"

FEATURES: Mapping[str, Feature] = MappingProxyType(
    {
        "products": Feature(
            CASTING,
            "An unchanged function multiplies in few bits",
            "Float32 functions with products: plain, and within what the framework has of jitted, "
            "recomputed and looped code. Which products are in 16 bits or fewer?",
            (f"{PROBES}::test_every_contraction_is_low",),
        ),
        "carry": Feature(
            CASTING,
            "A loop may begin with float32 zeros",
            "A recurrent network, and a loop whose carry is a product: do they run, and in few "
            "bits?",
            (
                f"{PROBES}::test_every_contraction_is_low",
                "tests/autocast/test_nested.py::test_a_float32_zeros_carry_becomes_low_with_the_body",
            ),
        ),
        "branches": Feature(
            CASTING,
            "A branch may return float32 zeros",
            "One branch returns a product, the other one zeros.",
            ("tests/autocast/test_nested.py::test_branches_of_different_kinds",),
        ),
        "sums": Feature(
            CASTING,
            "Sums and softmax stay in float32",
            "Three losses that overflow where they are computed in float16.",
            (f"{NUMERICS}::test_unmodified",),
        ),
        "shared": Feature(
            CASTING,
            "Gradients of shared weights add up in float32",
            "A weight of a loop of 4,096 turns, each with a gradient of 1.",
            (f"{NUMERICS}::test_gradient_of_a_weight_shared_by_4096_steps",),
        ),
        "leaves": Feature(
            CASTING,
            "Keys, whole and complex numbers stay what they are",
            "A batch that holds them, given to a loss that uses them.",
            (
                "tests/conformance/test_leaves.py::test_casts",
                "tests/conformance/test_leaves.py::test_select_and_transaction",
            ),
        ),
        "statistics": Feature(
            CASTING,
            "Batch statistics stay float32",
            "A running variance of numbers with a standard deviation of 400.",
            ("tests/conformance/test_frameworks.py::test_batch_statistics_beyond_float16",),
        ),
        "rules": Feature(
            CASTING,
            "Parts are kept in float32 by a rule, from outside",
            "One operation or layer is kept, and the model is not edited.",
            (
                "tests/autocast/test_rules.py::test_a_scope",
                "tests/autocast/test_rules.py::test_an_operation",
            ),
        ),
        "float32_loss": Feature(
            SCALING,
            "The loss is scaled in float32",
            "A loss of 2.21 at a scale of 32,768: their product is beyond float16.",
            ("tests/test_grad.py::TestPrecision::test_the_loss_is_float32_before_it_is_scaled",),
        ),
        "growth": Feature(
            SCALING,
            "A step in which the scale grows is like any other",
            "The same batch for six steps, in some of which the scale grows.",
            (
                "tests/test_grad.py::TestPrecision::test_gradients_are_bit_equal_across_a_growth_step",
            ),
        ),
        "bounds": Feature(
            SCALING,
            "The scale has bounds, and recovers",
            "400 bad steps, then good ones; and 400 steps in which the scale can grow.",
            (
                f"{DYNAMIC}::test_floor_holds_and_recovers",
                f"{DYNAMIC}::test_ceiling_then_bad_steps_is_still_a_power_of_two",
            ),
        ),
        "skip": Feature(
            SCALING,
            "A bad step changes nothing",
            "AdamW, and one infinite number in the batch; compared bit for bit.",
            ("tests/test_update.py::test_a_bad_step_changes_nothing",),
        ),
        "metric": Feature(
            SCALING,
            "An infinite metric is no overflow",
            "A metric beside the loss is infinite; loss and gradients are not.",
            ("tests/test_grad.py::TestAux::test_an_infinite_metric_is_no_overflow",),
        ),
        "names_leaf": Feature(
            SCALING,
            "A bad step names the parameter",
            "The gradient of one of two parameters is infinite: what does the step say?",
            ("tests/test_verdict.py::test_names_the_first_leaf_and_the_reason",),
        ),
        "shards": Feature(
            SCALING,
            "One bad device is everybody's",
            "One device or process of several has an infinite number: do all lower the scale?",
            (
                f"{PROBES}::test_shards_do_not_diverge",
                "tests/test_collective.py::test_one_bad_shard_is_everybodys_verdict",
            ),
        ),
        "limit": Feature(
            SCALING,
            "A run of bad steps ends with an error",
            "Steps that are skipped one after another are bad data, and no overflow.",
            ("tests/test_ledger.py::test_limit_says_what_to_look_at",),
        ),
        "microbatches": Feature(
            SCALING,
            "A bad microbatch is one skipped step",
            "One of two microbatches of a step is infinite.",
            ("tests/test_microbatch.py::test_one_bad_microbatch_is_one_skipped_step",),
        ),
        "fp8": Feature(
            BITS,
            "Products in 8 bits",
            "The gradient of one layer, as it is traced: what do its products multiply?",
            ("tests/f8/test_products.py::test_every_contraction",),
        ),
        "fp8_backward": Feature(
            BITS,
            "... also in the backward pass",
            "The same: two of the three products are those of the backward pass.",
            ("tests/f8/test_products.py::test_three_legs_in_eight_bits",),
        ),
        "stored_bytes": Feature(
            BITS,
            "Bytes a parameter, with AdamW",
            "What parameters and optimizer state take, of a matrix of 1024 x 1024.",
            (
                "tests/conformance/test_optimizers.py::TestLeaves::test_bytes_a_parameter",
                "tests/optim/test_any.py::test_a_master_of_24_bits_and_compressed_state_is_5_bytes",
            ),
        ),
        "release": Feature(
            BITS,
            "Layers are updated in the backward pass",
            "A step in which the gradients of all layers are never there at once.",
            ("tests/optim/test_release.py::test_it_is_the_plain_step",),
        ),
        "checkpoint": Feature(
            BITS,
            "State comes back from a checkpoint bit for bit",
            "The library's state in the middle of a run, kept and restored, and steps after it.",
            (
                "tests/test_checkpoints.py::test_round_trip",
                "tests/f8/test_state.py::test_resumed_bit_for_bit",
            ),
        ),
        "why": Feature(
            TOOLS,
            "Says why an operation is float32",
            "Something that lists operations, dtypes and reasons.",
            ("tests/explain/test_entries.py::test_reasons",),
        ),
        "bisect": Feature(
            TOOLS,
            "Finds what has to stay in float32",
            "Something that tells the parts which fail in few bits from those which do not.",
            ("tests/debug/test_bisect.py::test_planted_scopes",),
        ),
        "memory": Feature(
            TOOLS,
            "Predicts memory on hardware that is not there",
            "Something that says what a step takes on an accelerator.",
            ("tests/preflight/test_compilers.py::test_a_small_model",),
        ),
        "newest": Feature(
            TOOLS,
            "Runs on JAX 0.10",
            "One step.",
            ("tests/test_grad.py::test_under_every_transform",),
        ),
        "no_device": Feature(
            TOOLS,
            "Importing it starts no device",
            "An import where JAX is told to use a platform that does not exist.",
            ("tests/test_imports.py::test_import_starts_no_backend",),
        ),
    }
)
