"""The decoder: generic layers that a `ModelSpec` puts together."""
