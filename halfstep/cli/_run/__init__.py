"""Run the commands.

The modules above only say which options each command has, so that `halfstep --help` is quick. They
import their part from here when a command is run, and most of these parts import JAX.
"""
