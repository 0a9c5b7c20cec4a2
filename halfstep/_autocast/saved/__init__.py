"""Keep residuals for the backward pass: rules for them, and codes of 8 and 4 bits."""
