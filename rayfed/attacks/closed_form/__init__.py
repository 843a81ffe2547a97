"""What closed forms share: a model under study (`probe.py`), linear layers (`layers.py`), equations for samples."""
