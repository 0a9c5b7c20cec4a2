"""The one place where the version is written; the build reads it and the changelog must agree."""

__version__ = "0.1.0"
