"""What the tests on a GPU share. They need torch with a GPU, and its pack installed or on GRISTMILL_PACK_PATH."""

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def device():
    """The first GPU, as torch names it."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch.device("cuda", 0)


@pytest.fixture
def unloaded(device):
    """Nothing is loaded before the test, and what it loads is forgotten after it."""
    from gristmill.loader import forget_loaders

    torch.cuda.synchronize()
    forget_loaders()
    yield
    torch.cuda.synchronize()
    forget_loaders()
