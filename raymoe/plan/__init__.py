"""Policies, footprints, cost models and the search for a plan, in pure Python."""
