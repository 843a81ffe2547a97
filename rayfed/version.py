"""Version of rayfed."""

__version__ = "0.3.0.dev0"
