"""Provide the names of other libraries on halfstep's core: change the import, keep the step.

`import halfstep.compat.mpx as mpx` and `import halfstep.compat.jmp as jmp` have every public name
of mpx 0.1.8 and jmp 0.0.4, with their signatures and their order of returns;
`import halfstep.compat.jaxamp as jaxamp` has what the README of jaxamp 0.0.4 shows, and
`import halfstep.compat.mpfj as mpfj` has the names of MPfJ, as mpx was called at first.
"""
