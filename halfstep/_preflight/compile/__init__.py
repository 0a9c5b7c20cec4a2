"""Lower a step here, and compile it with a real compiler in another process."""
