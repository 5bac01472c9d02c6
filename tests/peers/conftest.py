"""The libraries that are compared with. Where one is missing these tests are skipped, unless they are asked for."""

import importlib
import importlib.util

import pytest


@pytest.fixture(scope="session")
def libraries(request: pytest.FixtureRequest) -> None:
    """torch, transformers and peft are there. Not importorskip: it also skips where one is installed and broken."""
    missing = [name for name in ("torch", "transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        refuse = pytest.fail if request.config.option.markexpr == "peers" else pytest.skip
        refuse(f"not installed: {', '.join(missing)}; they come with: pip install -e '.[peers]'")


@pytest.fixture(scope="session")
def theirs(libraries: None):
    """tools.peers.theirs; imported here, so that collecting these tests costs nothing and needs nothing."""
    return importlib.import_module("tools.peers.theirs")
