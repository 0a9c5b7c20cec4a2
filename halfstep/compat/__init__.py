"""Provide the names of other libraries on halfstep's core: change the import, keep the step.

`import halfstep.compat.mpx as mpx` and `import halfstep.compat.jmp as jmp` have every public name
of mpx 0.1.8 and jmp 0.0.4, with their signatures and their order of returns;
`import halfstep.compat.jaxamp as jaxamp` has those of jaxamp 0.0.4,
`import halfstep.compat.mpfj as mpfj` those of MPfJ, as mpx was called at first, and
`import halfstep.compat.flashoptim_jax as flashoptim_jax` those of flashoptim-jax 0.1.0.
"""
