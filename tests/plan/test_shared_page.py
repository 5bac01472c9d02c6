"""A page of a plan that others may see: nothing about this machine, a description, the batch, and links to a point."""

import re
from dataclasses import replace

import pytest

from plimsoll.extras.plan_page import PlanCommand, page
from plimsoll.extras.plan_page.batch_grid import GridPoint
from plimsoll.extras.plan_page.redaction import redact
from plimsoll.framework.plan.plan_report import BatchReport
from tests.support.plan_pages import IN_EFFECT, browse, needs_browser, plan

TEXTS = [
    ("--config=/home/me/x/my.py:tiny", "--config=my.py:tiny"),
    ("hf:/home/me/model", "hf:model"),
    ("~/x/y.json", "y.json"),
    ("~you/x/y.json", "y.json"),
    ("['/a/b.bin', '/c/d.bin']", "['b.bin', 'd.bin']"),
    ("File '/home/me/a.py', line 3", "File 'a.py', line 3"),
    ("https://me:secret@host/a/b?token=abc&x=1", "https://host/a/b?token=REDACTED&x=1"),
    ("hf_" + 30 * "a", "REDACTED"),
]
UNCHANGED = [
    *("hf:meta-llama/Llama-3.1-8B", "runs/x/config.json", "if each process writes 1 GB/s", "a / b"),
    *("hf://datasets/org/name", "https://host/a/b", "--html=plan.html"),
]


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_folders_and_credentials_are_removed(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize("text", UNCHANGED)
def test_other_texts_stay(text: str) -> None:
    assert redact(text) == text


def report(rows: int = 16):
    batch = BatchReport.make(rows, 4096, 2, row_shards=16, token_shards=1)
    made = plan(estimated=True)
    return replace(
        made,
        batch=batch,
        item="token",
        config="/home/somebody/configs/my.py:model",
        settings=[*made.settings, "data.source.path=/data/somebody/train.bin"],
        notes=["see /home/somebody/log"],
        in_effect={**IN_EFFECT, "data.global_batch_size": rows, "data.seq_len": 4096},
        smaller_batch=None,
    )


ASKED = PlanCommand(
    "--config=/home/somebody/configs/my.py:model",
    "--target=v5e-16",
    ["data.source.path=/data/somebody/train.bin"],
    ["--data=https://somebody:pw@host/x?token=abcdef", "--html=/home/somebody/plan.html"],
    ["--data=https://somebody:pw@host/x?token=abcdef"],
)


def test_a_page_names_nothing_of_this_machine() -> None:
    text = page([report()], asked=ASKED)
    assert "somebody" not in text
    assert "abcdef" not in text
    assert "--config=my.py:model" in text
    assert "--html=plan.html" in text


def test_head_describes_the_plan_with_its_batch() -> None:
    text = page([report()])
    (description,) = re.findall(r'<meta name="description" content="(.*?)">', text)
    assert description.startswith("my.py:model on v5e-16. ")
    assert "fits" in description
    assert "16 rows of 4,096 tokens = 65.5k tokens per step, in 2 microbatches; 1 row per device" in description
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
    assert "<title>my.py:model on v5e-16: plan</title>" in text
    # The content security policy lets the browser fetch nothing.
    assert "default-src 'none'" in text


@needs_browser
def test_a_link_opens_the_page_at_a_point(tmp_path) -> None:
    points = [GridPoint(rows, 4096, report(rows)) for rows in (16, 32, 64)]
    text = page([report()], points=points, asked=ASKED)
    shown = {}
    for fragment in ("", "#batch=64", "#batch=7", "#other"):
        seen, _ = browse(text.replace("<script>", f"<script>location.hash = '{fragment}';", 1), tmp_path)
        shown[fragment] = re.findall(r'data-follow="text:batch">(.*?)<', seen)
    assert shown["#batch=64"][0].startswith("64 rows of 4,096 tokens")
    assert {shown[fragment][0].partition(" ")[0] for fragment in ("", "#batch=7", "#other")} == {"16"}
