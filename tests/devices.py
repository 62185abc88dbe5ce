"""What tests need of the machine."""

import jax
import pytest

needs_two = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")


def on_a_cpu(why):
    """Skips elsewhere what is so on a CPU alone; says why."""
    return pytest.mark.skipif(jax.default_backend() != "cpu", reason=f"on a CPU alone {why}")
