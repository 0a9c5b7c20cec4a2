"""Kernels for operations that JAX cannot compose into one pass.

Each has a folder, with one file per backend.
"""
