"""How near a reconstruction is to the truth, for images (N, C, H, W) in [0, 1]."""
