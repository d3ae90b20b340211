"""The performance models of the three papers, each with its own constants, to compare ours with."""
