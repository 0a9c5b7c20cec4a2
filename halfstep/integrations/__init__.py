"""Optional frameworks: each module here needs its framework, and nothing else in halfstep does."""
