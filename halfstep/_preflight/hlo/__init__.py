"""Count what a compiled program does, from its optimized HLO."""
