"""FLAG, and its search for the threshold."""
