"""On what it runs: the cores and the memory of this machine, as this process may use them."""
