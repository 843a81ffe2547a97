"""Execution of federations on Ray: actors, actor pools and executors. Contains no algorithms."""
