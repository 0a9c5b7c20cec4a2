"""Store values for the backward pass: by which rules, under which names, and in which codes."""
