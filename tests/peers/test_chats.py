"""Chat templates against transformers' own: ids and masks of `apply_chat_template`, live.

What it computes is kept as tests/data/recorded_chats.json for those who do not have transformers: delete that file and
run this to record anew.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support import pretrained

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:::torch"),
    pytest.mark.filterwarnings("ignore:::transformers"),
]
RECORDED = Path(__file__).parents[1] / "data" / "recorded_chats.json"


def test_recorded_chats_are_those_of_transformers(tmp_path: Path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; it comes with: pip install -e '.[peers]'")
    from transformers import PreTrainedTokenizerFast

    found = {}
    for family, (_, _, bos, eos, template) in pretrained.FAMILIES.items():
        file = str(pretrained.write(tmp_path / family, family) / "tokenizer.json")
        theirs = PreTrainedTokenizerFast(tokenizer_file=file, bos_token=bos, eos_token=eos, chat_template=template)
        found[family] = []
        for chat in pretrained.CHATS:
            out = theirs.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
            found[family].append({name: list(out[name]) for name in ("input_ids", "assistant_masks")})
    if not RECORDED.exists():
        RECORDED.write_text(json.dumps(found))
    assert json.loads(RECORDED.read_text()) == found
