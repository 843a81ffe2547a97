"""Attacks of a server that sends other weights or layers than the protocol asks for."""
