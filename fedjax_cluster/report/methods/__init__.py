"""The pictures of single methods."""
