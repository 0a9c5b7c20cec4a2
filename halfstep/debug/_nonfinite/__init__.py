"""Where values that are not finite begin, and what to do about them."""
