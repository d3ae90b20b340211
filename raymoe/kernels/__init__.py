"""Compute kernels; each file holds wrappers, argument checks and plain references."""
