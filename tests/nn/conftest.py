"""Half the time in the compiler: most of these tests look at numbers that its optimisations cannot change."""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Leaves most of XLA's optimisations out, unless a test asks for them with the fixture `optimized`."""
    jax.config.update("jax_disable_most_optimizations", "optimized" not in request.fixturenames)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimized():
    """For tests of the programs that users run: the fused convolutions, and the layout they were compiled to."""
