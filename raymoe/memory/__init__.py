"""Where data lives: checkpoints, arenas of host memory, weights and the KV cache."""
