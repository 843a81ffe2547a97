"""Messages of attacks that could see nothing in an update: those who read tables of results know them by these.

They import no PyTorch, so that tables are read without it.
"""

from __future__ import annotations

ENCRYPTED = "the update is encrypted: there is a ciphertext and no gradient to look at"
MASKED = "the update is masked: without the other clients' shares it is uniform noise, and no gradient"
CHANNELS = ENCRYPTED, MASKED
"""Beginnings of the messages on an update that its channel hides."""
UNREHEARSED = "the defences could not be run on gradients of one's own"
"""Beginning of the messages of attackers who have a defence's code and could do nothing with it."""
UNUSED = "these attacks do not use all that the defences' code tells"
"""The same of those who could do something, where another attacker with the code may do more."""
UNSOLVED = "buffers that clients return are as many numbers as the samples have, and were not solved for them"
"""The same of those who saw what no defence of the update changes, from which another attacker may make more."""
