"""The network: configuration, layers, caches, checkpoints. Reads from `model.py` outwards."""
