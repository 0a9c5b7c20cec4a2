"""Show the numbers of a training loop while it runs."""
