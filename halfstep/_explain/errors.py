"""What `check` says."""


class LintError(AssertionError):
    """A function misses what was required of it; the message lists every miss with its line.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def product(w, x):
            with halfstep.keep_precision():
                return x @ w


        report = halfstep.explain(product, "bf16")(jnp.eye(4), jnp.eye(4))
        try:
            report.check(low=1.0)
        except halfstep.LintError as error:
            assert "required" in str(error)
        ```
    """
