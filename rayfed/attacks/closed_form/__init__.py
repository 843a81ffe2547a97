"""Closed-form attacks, one per file, and their shared code: a recorded model (`probe.py`), its linear layers
(`layers.py`) and equations.
"""
