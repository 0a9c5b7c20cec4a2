"""A traced program, and how the installed JAX writes its loops, branches, calls and derivatives."""
