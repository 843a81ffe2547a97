"""What a run is, without Ray: a scenario resolved into arms, its privacy accounts, its rounds and its records."""
