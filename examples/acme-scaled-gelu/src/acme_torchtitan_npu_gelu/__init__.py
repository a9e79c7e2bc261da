"""Scaled tanh GELU for torchtitan: an example of a plugin written outside the project."""

from acme_torchtitan_npu_gelu.__about__ import __version__

__all__ = ["__version__"]
