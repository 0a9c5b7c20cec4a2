"""Other people's programs, tiny and unmodified, under every policy; in their own environments."""
