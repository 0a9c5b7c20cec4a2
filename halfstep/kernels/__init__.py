"""Kernels for operations that JAX cannot compose into one pass.

A kernel for one kind of device is a file. An operation with several has a folder, with one file per
backend.
"""
