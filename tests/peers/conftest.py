"""The libraries to compare to. If one is missing, these tests are skipped, or fail if `-m peers` selects them."""

import importlib
import importlib.util

import pytest


@pytest.fixture(scope="session")
def libraries(request: pytest.FixtureRequest) -> None:
    """Require torch, transformers and peft. importorskip would also skip if one is installed but broken."""
    missing = [name for name in ("torch", "transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        refuse = pytest.fail if request.config.option.markexpr == "peers" else pytest.skip
        refuse(f"not installed: {', '.join(missing)}; they come with: pip install -e '.[peers]'")


@pytest.fixture(scope="session")
def theirs(libraries: None):
    """The module tools.peers.theirs, imported here so that collecting these tests is cheap and needs no packages."""
    return importlib.import_module("tools.peers.theirs")
