"""CSV and TSV: rows are read as the csv module writes them, and a file that is not a table gives one error."""

import csv
import gzip
from pathlib import Path

import pytest

from plimsoll.framework.data.detect_format import detect_format
from plimsoll.framework.data.files import find
from plimsoll.framework.data.row_files import csv_rows
from plimsoll.framework.data.sources import Csv
from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.launch import train

ROWS = [
    {"text": 'with "quotes", a comma', "label": "positive"},
    {"text": "two\nlines", "label": ""},
    {"text": "tab\there; semicolon", "label": "a"},
    {"text": "é" * 200_000, "label": "longer than the module's own limit"},
]


def write(path: Path, delimiter: str = ",", rows: list[dict[str, str]] = ROWS, encoding: str = "utf-8") -> Path:
    with open(path, "w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(path: Path) -> list[dict[str, str]]:
    (file,) = find([str(path)])
    return [row for _, row in csv_rows(file)]


@pytest.mark.parametrize(
    ("name", "delimiter", "encoding"),
    [("a.csv", ",", "utf-8"), ("a.csv", ";", "utf-8"), ("a.tsv", "\t", "utf-8"), ("a.csv", ",", "utf-8-sig")],
)
def test_rows_come_back(tmp_path: Path, name: str, delimiter: str, encoding: str) -> None:
    assert read(write(tmp_path / name, delimiter, encoding=encoding)) == ROWS


def test_compressed_files_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text,label\r\n\r\none,1\r\n"))
    assert read(path) == [{"text": "one", "label": "1"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "expected a header"),
        (b"text,text\na,b\n", "expected a header with a distinct name"),
        (b"text,\na,b\n", "expected a header with a distinct name"),
        (b"text,label\na\n", r"a\.csv, line 2: 1 fields, but the header has 2"),
        (b'text,label\n"a,b\nc,d\n', r"a\.csv, line \d: not CSV: unexpected end of data"),
        (b'text,label\n"a"b,c\n', r"a\.csv, line 2: not CSV"),
        (b"text,label\na,\xff\n", "not UTF-8 at byte 13"),
    ],
)
def test_malformed_table_is_one_error(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "a.csv")


def test_detection_uses_the_text_column(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", rows=[{"id": str(i), "review": f"Row {i}, with a comma."} for i in range(400)])
    found = detect_format(str(tmp_path / "a.csv"))
    assert found.line.startswith("data: CSV from ")
    train, held_out = (list(part.instantiate().documents()) for part in (found.source, found.held_out))
    assert sorted([*train, *held_out]) == sorted(f"Row {i}, with a comma." for i in range(400))
    assert not set(train) & set(held_out)


def test_data_that_is_given_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = write(tmp_path / "a.csv")
    argv = ["--config=nanogpt-cpu", f"--data={path}", f"--data={path}", f"--workdir={tmp_path}/run", "--dry_run"]
    assert train.main(argv) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert f"--data={path} is given twice" in error
    assert error.count("\n") == 1


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"line 2: no column 'texts'; did you mean 'text'"):
        list(Csv(paths=[str(path)], column="texts").documents())


def test_labels_without_a_classifier_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="field 'label' is 'positive'"):
        detect_format(str(write(tmp_path / "a.csv")))
