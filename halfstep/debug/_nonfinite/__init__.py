"""Find where non-finite values began, and what to do about them."""
