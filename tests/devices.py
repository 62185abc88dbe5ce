"""What tests need of the machine."""

import jax
import pytest

on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of CPUs alone")
needs_two = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
