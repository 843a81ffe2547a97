"""Shared code of closed-form attacks: a model under study (`probe.py`), linear layers (`layers.py`), equations."""
