"""Checkpoints, arenas of host memory, weights, activations and the KV cache."""
