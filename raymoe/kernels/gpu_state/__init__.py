"""States of sequences on a device: Triton's kernels where it runs, torch elsewhere."""
