"""How big: policies, footprints, cost, and the search for a plan. Pure Python."""
