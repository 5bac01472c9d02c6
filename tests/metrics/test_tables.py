"""Units and tables: what is shown, that it fits, and that the terminal and the log say the same."""

import io
import math
import os
import pty
import re

import pytest

from framework.metrics.tables import (
    Section,
    human_bytes,
    human_count,
    human_seconds,
    print_table,
    render,
    start_table,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1023.9 * 1024, "1.00 MiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (15.75 * 2**30, "15.75 GiB"),
        (139.8 * 2**30, "139.8 GiB"),
        (3 * 2**50, "3072.0 TiB"),
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
        (999.96, "1.0k"),
        (124_439_808, "124.4M"),
        (6_738_415_616, "6.7B"),
        (8.56e14, "856.0T"),
        (None, "-"),
        (math.inf, "-"),
    ],
)
def test_human_count(count, text):
    assert human_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.25, "250 ms"),
        (0.9999, "1.0 s"),
        (12.34, "12.3 s"),
        (59.97, "1m 00s"),
        (192, "3m 12s"),
        (3599.9, "1h 00m"),
        (7500, "2h 05m"),
        (200_000, "2d 07h"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_human_seconds(seconds, text):
    assert human_seconds(seconds) == text


def sections():
    return start_table(
        config="gpt2-124m",
        accelerator="v5e-8",
        mesh={"data": 1, "fsdp": 8},
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
        data={"source": "stdlib [bold]3.11[/bold]", "files": "a" * 300},
        versions={"jax": "0.10.2"},
    )


def test_start_table_says_it_all():
    text = render(sections())
    squeezed = re.sub(r" +", " ", text)
    for line in (
        "config gpt2-124m",
        "accelerator v5e-8",
        "mesh data 1 fsdp 8",
        "tokens per step 524,288",
        "FLOPs per token 856.0M",
        "parameter 124,439,808 124.4M 237.4 MiB",
        "sum 124,440,808 124.4M 237.4 MiB",
        "group device pinned_host",
        "parameter 31.00 MiB -",
        "optimizer 1.00 MiB 1.00 GiB",
        "sum 32.00 MiB of 15.75 GiB 1.00 GiB",
        "source stdlib [bold]3.11[/bold]",
        "jax 0.10.2",
    ):
        assert line in squeezed
    assert text.isascii()


@pytest.mark.parametrize("width", [100, 80, 60])
def test_no_line_is_too_wide_and_nothing_is_lost(width):
    text = render(sections(), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert text.count("a" * 10) * 10 <= text.count("a")
    assert re.sub(r"\s", "", text).count("a" * 300) == 1
    assert all(line == line.rstrip() for line in text.splitlines())


def test_columns_line_up():
    rows = [["short", "1", "x"], ["a longer name", "1,000,000", "yy"]]
    lines = render([Section("title", rows, header=["name", "count", "z"], numbers=True)]).splitlines()
    assert lines[0] == "title"
    assert len({line.index(word) + len(word) for line, word in zip(lines[2:], ("1 ", "1,000,000 "), strict=True)}) == 1


def test_start_table_without_optional_parts():
    table = start_table(
        config="c",
        accelerator="cpu-1",
        mesh={},
        parameters=[],
        device_bytes={},
        tokens_per_step=1,
        flops_per_token=None,
    )
    text = re.sub(r" +", " ", render(table))
    assert "FLOPs per token -" in text
    assert "mesh -" in text
    assert "versions" not in text


def test_a_file_gets_the_plain_text():
    out = io.StringIO()
    print_table(sections(), out)
    assert out.getvalue() == render(sections())


def test_a_terminal_gets_the_same_words():
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        print_table(sections()[:3], terminal)
    seen = b""
    while True:
        try:
            seen += os.read(reader, 4096)
        except OSError:  # how Linux says that the other end is closed and all is read
            break
    os.close(reader)
    words = re.sub(r"\x1b\[[0-9;]*m", "", seen.decode()).split()
    assert words == render(sections()[:3]).split()
    assert b"\x1b[1m" in seen
