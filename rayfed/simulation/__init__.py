"""Simulation of a federation without Ray: inputs, clients, the server, rounds and executors."""
