"""Performance models of three papers with their own constants, for comparison."""
