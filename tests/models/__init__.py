"""Models in plain float32 that tests and benchmarks take: each is written as its users write it."""
