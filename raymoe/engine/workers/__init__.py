"""Helper processes that answer framed requests within limits, and their clients."""
