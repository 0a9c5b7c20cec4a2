"""Find a policy that keeps a step within a memory budget."""
