"""The comparisons of test_preferences_recorded.py, live with TRL, on other weights and examples."""

import importlib
import importlib.util

import pytest

from tools.peers import preference_ours as ours
from tools.peers.preference_cases import CASES

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.filterwarnings("ignore:::trl"),
    pytest.mark.filterwarnings("ignore:::accelerate"),
    # TRL warns about everything in trl.experimental.
    pytest.mark.filterwarnings("ignore:.*experimental"),
]
SEED = 46
LIMIT = 1e-5


@pytest.fixture(scope="module")
def preference_theirs(libraries, request):
    """The module tools.peers.preference_theirs, which needs TRL."""
    if importlib.util.find_spec("trl") is None:
        refuse = pytest.fail if request.config.option.markexpr == "peers" else pytest.skip
        refuse("not installed: trl; it comes with: pip install -e '.[peers]'")
    return importlib.import_module("tools.peers.preference_theirs")


@pytest.mark.parametrize("name", CASES)
def test_loss_gradients_and_ten_steps(name, preference_theirs):
    case = CASES[name]
    results = preference_theirs.compute(case, SEED)
    for packed in (False, True):
        errors = ours.gradient_errors(case, results, SEED, packed=packed)
        errors |= {
            f"trained/{path}": error for path, error in ours.training_errors(case, results, SEED, packed=packed).items()
        }
        assert {path: error for path, error in errors.items() if not error <= LIMIT} == {}, packed
