"""What tests need of the machine."""

import jax
import pytest

needs_two = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
