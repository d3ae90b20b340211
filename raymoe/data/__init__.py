"""The Ray Data operator. Only functions that get a dataset or a cluster import Ray."""
