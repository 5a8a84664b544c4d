"""A synchronous trainer for click and conversion ranking models in JAX."""

__version__ = "0.1.0"
