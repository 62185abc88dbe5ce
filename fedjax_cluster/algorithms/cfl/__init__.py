"""CFL by recursive bipartition, and what it leaves: splits, the parameter tree, transforms for privacy."""
