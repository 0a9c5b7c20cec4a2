"""Define the errors that are raised when no answer is possible, or a step does not fit."""


class PreflightError(RuntimeError):
    """No answer is possible: a compiler is missing, the step cannot be lowered, a compile failed.

    The message says what was required, what was given, and what to type.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        try:
            halfstep.preflight(jnp.sin, (jnp.ones(2),), targets="h100", gemm="cublas")
        except halfstep.PreflightError as error:
            assert '"library"' in str(error)
        ```
    """


class DoesNotFitError(PreflightError):
    """A step needs more memory than its target has; see `PreflightReport.require_fit`.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def double(x):
            return 2 * x


        x = jax.ShapeDtypeStruct((2**17, 2**17), jnp.float32)

        report = halfstep.preflight(double, (x,), targets="rtx4070")
        try:
            report.require_fit()
        except halfstep.DoesNotFitError as error:
            assert "rtx4070" in str(error)
        ```
    """


class RefusedError(PreflightError):
    """A compiler refused the program; with other flags it might not."""
