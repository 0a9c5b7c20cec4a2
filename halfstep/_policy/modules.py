"""Wrap Equinox modules, so that they stay modules, whose parameters optimizers find.

This is apart from the functions that wrap, because it imports Equinox: a program without an Equinox
module does not need it.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import numpy as np

from halfstep._policy.kept_calls import KEEP_SCOPE, full_precision_call


class KeptModule(eqx.Module):
    """A module whose inside is left as it is; still a pytree of its parameters."""

    module: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module in the scope that `autocast` leaves alone."""
        with jax.named_scope(KEEP_SCOPE):
            return self.module(*args, **kwargs)


class FullPrecisionModule(eqx.Module):
    """A module that runs in float32, its own parameters included; still a pytree of them."""

    module: Any
    return_dtype: np.dtype | None = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its parameters and the arguments in float32."""

        def run(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)

        # The module is an argument here, so that its parameters are cast as well.
        return full_precision_call(run, self.return_dtype, (self.module, *args), kwargs)
