"""Other frameworks, whose users need not leave them: one file each, imported only by who uses that framework."""
