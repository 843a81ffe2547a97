"""The engine of a run, without Ray: arms resolved from a scenario, privacy accounts, rounds and records."""
