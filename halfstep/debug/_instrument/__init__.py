"""A program with its values recorded: what is recorded, where, and what each value is made of."""
