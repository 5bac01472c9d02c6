"""docs/finetune.md, run as written; peft loads the exported adapter and computes what we trained."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.runs import xla_flags

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "finetune.md").read_text()
pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.filterwarnings("ignore:::peft"),
]


@pytest.mark.timeout(1500)
def test_from_a_directory_to_an_adapter(libraries, tmp_path, monkeypatch):
    import peft

    monkeypatch.chdir(tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": xla_flags(),
        "TMPDIR": str(tmp_path),
    }
    printed = []
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.S):
        done = subprocess.run(["bash", "-e", "-c", block], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout)
    assert "fits" in printed[2]
    losses = [float(x) for x in re.findall(r"^step .*? loss +([\d.]+)", printed[3], re.M)]
    assert losses[-1] < losses[0] - 1

    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    names: dict = {}
    exec(block, names)
    assert isinstance(names["model"], peft.PeftModel)
    import torch
    from transformers import AutoModelForCausalLM

    from plimsoll.framework.program.program import Program
    from plimsoll.launch import weights

    tokens = np.arange(1, 25)[None].repeat(8, 0)  # one row per device
    loaded = weights.load(*weights.parse(weights.parser("mine", None), ["--workdir=runs/tuned"]))
    program: Program = loaded.program
    context = program.evaluation_context({"tokens": tokens})
    ours = np.asarray(program.experiment.model.logits(program.weights(loaded.state), context, {}))
    with torch.no_grad():
        for model in (names["model"].eval(), AutoModelForCausalLM.from_pretrained("tuned").eval()):
            theirs = model(torch.as_tensor(tokens)).logits.numpy()
            assert np.abs(theirs - ours).max() <= 1e-4 * np.abs(ours).max()
        base = AutoModelForCausalLM.from_pretrained("tiny").eval()(torch.as_tensor(tokens)).logits.numpy()
    assert np.abs(base - ours).max() > 0.1 * np.abs(ours).max()
    assert names["tokenizer"].decode(names["tokenizer"].encode("What is while?")) == "What is while?"
