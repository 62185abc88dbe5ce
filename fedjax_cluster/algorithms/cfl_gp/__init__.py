"""CFL-GP, and the gradient profiles that it clusters."""
