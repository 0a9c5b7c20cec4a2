"""Run a program with its values recorded, and know what each value is made of."""
