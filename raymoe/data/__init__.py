"""For whom: the Ray Data operator. Ray is needed only where a dataset is."""
