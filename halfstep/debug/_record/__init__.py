"""Record the last steps in a log, and report what it says."""
