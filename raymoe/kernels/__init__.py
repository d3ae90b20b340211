"""How things are computed fast; each file holds a wrapper, its checks and a plain reference."""
