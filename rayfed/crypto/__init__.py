"""Primitives of encrypted aggregation: keys, Paillier, lattices, packing, tags; independent of federations."""
