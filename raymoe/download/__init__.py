"""Models that are elsewhere: their small files for plans, and their weights, once a node."""
