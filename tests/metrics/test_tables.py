"""Units and tables: the text shown, and the alignment of columns."""

import math
import re

import pytest

from plimsoll.framework.terminal.tables import TableSection, human_bytes, human_count, render, start_table


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (15.75 * 2**30, "15.75 GiB"),
        (139.8 * 2**30, "139.80 GiB"),
        (3 * 2**50, "3072.00 TiB"),
        (-2048, "-2.00 KiB"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_human_bytes(size, text):
    assert human_bytes(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (950, "950"),
        (2.5, "2.5"),
        (12_345.6, "12.3k"),
        (124_439_808, "124.4M"),
        (6_738_415_616, "6.7B"),
        (8.56e14, "856.0T"),
        (None, "-"),
        (math.inf, "-"),
    ],
)
def test_human_count(count, text):
    assert human_count(count) == text


def sections():
    return start_table(
        config="gpt2-124m",
        accelerator="v5e-8",
        mesh="data 1  fsdp 8",
        parameters=[("parameter", 124_439_808, 248_879_616), ("frozen", 1000, 2000)],
        device_bytes={
            ("parameter", "device"): 31 * 2**20,
            ("optimizer", "pinned_host"): 2**30,
            ("optimizer", "device"): 2**20,
            ("counter", "device"): 24,
        },
        tokens_per_step=524_288,
        flops_per_token=8.56e8,
        device_limit_bytes=int(15.75 * 2**30),
        data={"source": "stdlib [bold]3.11[/bold]", "files": "12"},
        versions={"jax": "0.10.2"},
    )


def test_start_table_is_complete():
    text = render(sections())
    squeezed = re.sub(r" +", " ", text)
    for line in (
        "config gpt2-124m",
        "accelerator v5e-8",
        "mesh data 1 fsdp 8",
        "tokens per step 524,288",
        "FLOPs per token 856.0M",
        "parameter 124,439,808 124.4M 237.35 MiB",
        "sum 124,440,808 124.4M 237.35 MiB",
        "group device pinned_host",
        "parameter 31.00 MiB -",
        "optimizer 1.00 MiB 1.00 GiB",
        "sum 32.00 MiB of 15.75 GiB 1.00 GiB",
        "source stdlib [bold]3.11[/bold]",
        "jax 0.10.2",
    ):
        assert line in squeezed
    assert text.isascii()


def test_columns_line_up():
    rows = [["name", "count", "z"], ["short", "1", "x"], ["a longer name", "1,000,000", "yy"]]
    assert render([TableSection("title", rows, numbers=True)]).splitlines() == [
        "title",
        "  name                count    z",
        "  short                   1    x",
        "  a longer name   1,000,000   yy",
    ]
    assert render([TableSection("title", rows)]).splitlines()[2] == "  short           1           x"
