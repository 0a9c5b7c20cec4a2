"""Operations that no composition of JAX's own does in one pass: a folder each, a file a backend."""
