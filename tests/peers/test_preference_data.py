"""Tokens of pairs and rated answers, compared live to those that TRL's trainers make of the same rows.

tests/data/recorded_preferences.json stores TRL's tokens for users without TRL. To record them again, run
`python -m tests.peers.test_preference_data`.
"""

import copy
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import pretrained
from tests.support.preference_rows import CHATS, TEXTS, THUMBS

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
RECORDED = Path(__file__).parents[1] / "data" / "recorded_preferences.json"


def encode_with_trl(folder: Path) -> dict[str, Any]:
    """Return {family: {rows: [ids of each row's prompt and answers]}} and the versions of the libraries."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    found: dict[str, Any] = {"versions": {"trl": trl.__version__, "transformers": transformers.__version__}}
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    for family, (_, _, bos, eos, template) in pretrained.FAMILIES.items():
        file = str(pretrained.write(folder / family, family) / "tokenizer.json")
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=file, bos_token=bos, eos_token=eos, pad_token=eos, chat_template=template
        )
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=512, **shape))
        settings = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "max_length": None, "bf16": False}
        found[family] = {}
        for name, rows in (("texts", TEXTS), ("chats", CHATS)):
            trainer = trl.DPOTrainer(
                model=model,
                ref_model=copy.deepcopy(model),
                args=trl.DPOConfig(**settings),
                train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer,
            )
            columns = ("prompt_ids", "chosen_ids", "rejected_ids")
            found[family][name] = [[row[column] for column in columns] for row in trainer.train_dataset]
        trainer = trl.KTOTrainer(
            model=model,
            ref_model=copy.deepcopy(model),
            args=trl.KTOConfig(
                **settings, per_device_train_batch_size=len(THUMBS), train_sampling_strategy="sequential"
            ),
            train_dataset=Dataset.from_list(THUMBS),
            processing_class=tokenizer,
        )
        columns = ("prompt_ids", "completion_ids", "KL_completion_ids", "label")
        found[family]["thumbs"] = [[row[column] for column in columns] for row in trainer.train_dataset]
    return found


def test_recorded_tokens_match_trl(libraries, request: pytest.FixtureRequest, tmp_path: Path):
    if importlib.util.find_spec("trl") is None:
        refuse = pytest.fail if request.config.option.markexpr == "peers" else pytest.skip
        refuse("not installed: trl; it comes with: pip install -e '.[peers]'")
    recorded, found = json.loads(RECORDED.read_text()), encode_with_trl(tmp_path)
    for family in pretrained.FAMILIES:
        assert recorded[family] == found[family], family


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        RECORDED.write_text(json.dumps(encode_with_trl(Path(folder))))
