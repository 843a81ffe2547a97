"""The version of rayfed."""

__version__ = "0.2.0"
