"""Federated learning that measures its own leaks: attacks, defences, aggregation and the engine that runs them.

Everything below this package is plain PyTorch and works without Ray; `actors` adds Ray.
"""

__version__ = "0.1.0"
