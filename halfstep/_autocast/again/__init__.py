"""Make values again for the backward pass: which operations go together, and in which form."""
