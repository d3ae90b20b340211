"""Helper processes: scripts that answer framed requests within limits, and our end of them."""
