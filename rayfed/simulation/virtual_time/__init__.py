"""Virtual time: how long rounds take on the clients' devices."""
