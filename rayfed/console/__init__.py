"""What runs and sweeps look like in a terminal."""

from rayfed.console.run import RunView, guarantees
from rayfed.console.sweep import SweepView

__all__ = ["RunView", "SweepView", "guarantees"]
