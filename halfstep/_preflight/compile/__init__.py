"""A step, lowered here and compiled by a real compiler in a process of its own."""
