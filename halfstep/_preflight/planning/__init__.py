"""A memory budget in, a policy out."""
