"""Core: seeds, losses, files and checks of inputs, which all other packages use."""
