"""The startup message of a verb, and the process of a job that prints it."""

import pytest

from plimsoll.launch.startup_message import is_first, startup_message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["/x/launch/train.py", "--config=nanogpt-cpu", "--workdir=w"], "starting train of nanogpt-cpu"),
        (["/x/bin/plimsoll", "generate", "--workdir", "runs/a"], "starting generate of runs/a"),
        (["plimsoll.launch.train", "--config", "a"], "starting train of a"),
        (["/x/launch/__main__.py", "configs", "list"], "starting configs"),
        (["/x/bin/plimsoll"], "starting plimsoll"),
    ],
)
def test_startup_message(argv: list[str], words: str):
    assert startup_message(argv) == words


@pytest.mark.parametrize(
    ("argv", "environment", "is_heard"),
    [
        (["train"], {}, True),
        (["train", "--process_id=0"], {}, True),
        (["train", "--process_id=1"], {}, False),
        (["train", "--process_id", "1"], {}, False),
        (["train"], {"SLURM_PROCID": "3"}, False),
        (["train"], {"JAX_PROCESS_ID": "0"}, True),
        (["train"], {"OMPI_COMM_WORLD_RANK": "1"}, False),
        (["train"], {"TPU_WORKER_ID": "WARNING: could not determine TPU worker number"}, True),
    ],
)
def test_only_one_process_prints_the_startup_message(argv: list[str], environment: dict[str, str], is_heard: bool):
    assert is_first(argv, environment) == is_heard
