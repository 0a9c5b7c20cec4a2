"""What is kept for the backward pass: rules for it, and codes of few bits."""
