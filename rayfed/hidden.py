"""Messages of attacks that could not use an update. The analysis of results recognises such attacks by them.

This module does not import PyTorch, so that tables can be read without it.
"""

from __future__ import annotations

ENCRYPTED = "the update is encrypted: the attacker sees a ciphertext, not a gradient"
MASKED = "the update is masked: without the other clients' shares it is uniform noise"
CHANNELS = ENCRYPTED, MASKED
"""First words of the message if the channel hides the update."""
UNREHEARSED = "the attack could not run the defences' code on its own gradients"
"""First words of the message if an attack has a defence's code but could not use it."""
UNUSED = "these attacks use only a part of the defences' code"
"""First words of the message if another attack with the code may reconstruct more."""
UNSOLVED = "the returned buffers could determine the samples"
"""First words of the message if another attack may reconstruct samples from buffers, which no defence changes."""
