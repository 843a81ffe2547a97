"""Virtual time: the durations of rounds on the clients' devices."""
