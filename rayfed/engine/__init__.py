"""Engine of a run, without Ray: inputs, privacy accounts, rounds, attacks and records."""
