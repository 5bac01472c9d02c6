"""Chat templates compared to transformers: ids and masks of `apply_chat_template`, live.

tests/data/recorded_chats.json stores the results for users without transformers. To record them again, run
`python -m tests.peers.test_chats`.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support import pretrained

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
]
RECORDED = Path(__file__).parents[1] / "data" / "recorded_chats.json"


def encode_with_transformers(folder: Path) -> dict[str, Any]:
    """Return {family: [ids and masks of each chat]} and the version of transformers."""
    import transformers

    found: dict[str, Any] = {"versions": {"transformers": transformers.__version__}}
    for family, (_, _, bos, eos, template) in pretrained.FAMILIES.items():
        file = str(pretrained.write(folder / family, family) / "tokenizer.json")
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_file=file, bos_token=bos, eos_token=eos, chat_template=template
        )
        found[family] = []
        for chat in pretrained.CHATS:
            out = theirs.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
            found[family].append({name: list(out[name]) for name in ("input_ids", "assistant_masks")})
    return found


def test_recorded_chats_match_transformers(libraries, tmp_path: Path):
    recorded, found = json.loads(RECORDED.read_text()), encode_with_transformers(tmp_path)
    for family in pretrained.FAMILIES:
        assert recorded[family] == found[family], family


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        RECORDED.write_text(json.dumps(encode_with_transformers(Path(folder))))
