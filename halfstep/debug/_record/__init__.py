"""A log of the last steps, and what it says."""
