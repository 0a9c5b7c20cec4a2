"""Run a program while recording its values, and find what each value is computed from."""
