"""Executors: they run the calls of a round in this process or, with `actors`, on Ray."""
