"""Describe what a step is compiled for: accelerators, slices, meshes."""
