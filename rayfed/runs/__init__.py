"""Runs and sweeps: launch, resume, record, and the scenarios that they read."""
