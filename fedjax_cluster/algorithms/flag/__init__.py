"""FLAG."""
