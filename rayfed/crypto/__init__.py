"""Primitives of encrypted aggregation: keys, Paillier, lattices, packing, tags. They know no federation."""
