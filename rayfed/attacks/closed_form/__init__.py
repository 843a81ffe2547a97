"""Code shared by closed-form attacks: a recorded model (`probe.py`), its linear layers (`layers.py`), equations."""
