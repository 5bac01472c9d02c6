"""Each source yields the documents in its files, and reports an error with the file and the position in it."""

import bz2
import gzip
import hashlib
import json
import lzma
import platform
import sysconfig
from pathlib import Path

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from plimsoll.framework.config import config_for
from plimsoll.framework.data.files import FileHashes
from plimsoll.framework.data.sources import (
    JsonLines,
    Mixture,
    Parquet,
    StdlibSource,
    TextFiles,
    assign_split,
    library_files,
)

TEXTS = ["def f():\n    return 1\n", "é 你好 🚢\r\n", "no newline at the end", "x" * 3000]


def jsonl(records: list) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.mark.parametrize("chunk", [1, 5, 7, 1 << 20])
def test_text_files_byte_for_byte_and_separators_wherever_chunks_end(tmp_path: Path, monkeypatch, chunk: int):
    monkeypatch.setattr("plimsoll.framework.data.row_files._CHUNK_BYTES", chunk)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    assert list(TextFiles(paths=[str(tmp_path / "*.txt")]).documents()) == TEXTS
    (tmp_path / "all.txt").write_bytes("<|end|>".join(TEXTS).encode())
    assert list(TextFiles(paths=[str(tmp_path / "all.txt")], separator="<|end|>").documents()) == TEXTS
    with pytest.raises(ValueError, match=r"separator"):
        TextFiles(paths=["x"], separator="")


def test_json_lines_compressed_remote_and_with_blank_lines(tmp_path: Path):
    data = jsonl([{"body": text, "id": 1} for text in TEXTS]).replace(b"\n", b"\n\n", 1)
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    fsspec.filesystem("memory").pipe("/sources-test/c.jsonl", data)
    paths = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz"), "memory://sources-test/c.jsonl"]
    assert list(JsonLines(paths=paths, field="body").documents()) == TEXTS * 3


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet_over_row_groups_local_and_remote(tmp_path: Path, kind: str):
    column = pyarrow.array(TEXTS * 100)
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(getattr(pyarrow, kind)())
    parquet.write_table(pyarrow.table({"id": range(400), "body": column}), tmp_path / "x.parquet", row_group_size=70)
    data = (tmp_path / "x.parquet").read_bytes()
    fsspec.filesystem("memory").pipe("/sources-test/x.parquet", data)
    source = Parquet(paths=[str(tmp_path / "x.parquet"), "memory://sources-test/x.parquet"], column="body")
    for file in source.files():
        assert list(source.read(file)) == TEXTS * 100
        assert file.position == len(data)


# ---- errors, and their position


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "half', "Unterminated"),
        (b'{"txt": "a", "id": 1}', "no field 'text'; did you mean 'txt'"),
        (b'{"text": 7}', "field 'text' is int, expected text"),
        (b'["a"]', "expected a JSON object, given list"),
        (b'{"text": "\xff"}', "can't decode byte 0xff"),
        (b'{"text": "\\ud83d"}', "surrogates not allowed"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: bytes, message: str):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "fine"}\n' * 2 + line + b"\n")
    read = JsonLines(paths=[str(tmp_path / "x.jsonl")]).documents()
    assert [next(read), next(read)] == ["fine", "fine"]
    with pytest.raises(ValueError, match=rf"{tmp_path}/x.jsonl, line 3 \(byte 34\): .*{message}"):
        next(read)


def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path: Path):
    (tmp_path / "x.txt").write_bytes("é".encode() + b"ab\xffcd")
    with pytest.raises(ValueError, match=rf"{tmp_path}/x.txt: not UTF-8 at byte 4: invalid"):
        list(TextFiles(paths=[str(tmp_path / "x.txt")]).documents())
    (tmp_path / "x.txt").write_bytes(b"good|also\xff|")
    with pytest.raises(ValueError, match=r"not UTF-8 at byte 9"):
        list(TextFiles(paths=[str(tmp_path / "x.txt")], separator="|").documents())


@pytest.mark.parametrize("damage", ["truncate", "flip"])
@pytest.mark.parametrize(("extension", "module"), [("gz", gzip), ("xz", lzma), ("bz2", bz2)])
def test_damaged_compressed_files_are_named_and_never_end_silently(tmp_path: Path, extension, module, damage: str):
    data = bytearray(module.compress(jsonl([{"text": f"line {i} {i * i}"} for i in range(3000)])))
    if damage == "truncate":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 0x10
    path = tmp_path / f"x.jsonl.{extension}"
    path.write_bytes(data)
    for source in (JsonLines, TextFiles):
        with pytest.raises(ValueError, match=rf"{path}(, line|: damaged or truncated after byte \d+ of its text)"):
            list(source(paths=[str(path)]).documents())


def test_parquet_damage_is_named(tmp_path: Path):
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": [f"document {i} " * 20 for i in range(500)]})
    plain = {"write_page_checksum": True, "compression": "NONE", "use_dictionary": False}
    parquet.write_table(table, path, row_group_size=100, **plain)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(ValueError, match=rf"{path}: damaged, truncated or not Parquet"):
        list(Parquet(paths=[str(path)]).documents())
    damaged = bytearray(whole)
    damaged[whole.index(b"document 450 ")] ^= 1  # the checksum of its page fails, though the text still decodes
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"{path}: damaged.*after row 256"):
        list(Parquet(paths=[str(path)]).documents())


def test_unsuitable_parquet_columns_are_refused(tmp_path: Path):
    path = str(tmp_path / "x.parquet")
    parquet.write_table(pyarrow.table({"texts": ["a", None], "n": [1, 2]}), path)
    for column, message in [
        ("text", "x.parquet: no column 'text'; did you mean 'texts'"),
        ("n", "row 0: expected text, given int"),
        ("texts", "row 1: expected text, given NoneType"),
    ]:
        with pytest.raises(ValueError, match=message):
            list(Parquet(paths=[path], column=column).documents())


# ---- the standard library


def test_tests_and_installed_packages_are_left_out(tmp_path: Path):
    kept = ["abc.py", "unittest/case.py", "email/mime/text.py", "doctest.py", "test_like.py"]
    left_out = [
        "test/test_abc.py", "unittest/tests/x.py", "idlelib/idle_test/x.py", "lib2to3/tests/data/y.py",
        "ctypes/test/x.py", "site-packages/numpy/x.py", "dist-packages/x.py", "__pycache__/x.py", "my_tests/x.py",
        "ensurepip/_bundled/x.py", "config-3.11-x86_64-linux-gnu/x.py", "_sysconfigdata__linux.py",
    ]  # fmt: skip
    for name in [*kept, *left_out, "not_python.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert library_files(tmp_path) == sorted(kept)


def test_split_depends_only_on_names_and_is_a_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}.*zipped or stripped"):
        StdlibSource().files()
    names = [f"m{i}.py" for i in range(400)]
    for name in names:
        (tmp_path / name).write_bytes(f"# {name}\n".encode())
    parts = {split: list(StdlibSource(split=split).documents()) for split in ("train", "validation")}
    assert sorted(parts["train"] + parts["validation"]) == sorted(f"# {name}\n" for name in names)
    assert parts["validation"] == [f"# {name}\n" for name in sorted(names) if assign_split(name) == "validation"]
    assert 8 <= len(parts["validation"]) <= 36  # 5% of 400


def test_the_running_library_is_recorded_by_hash():
    record, root = StdlibSource(split="validation").contents(FileHashes()), sysconfig.get_path("stdlib")
    assert record["settings"] == {"split": "validation", "python": platform.python_version()}
    assert 20 <= len(record["files"]) <= 60
    for file in record["files"]:
        assert assign_split(str(Path(file["name"]).relative_to(root))) == "validation"
        assert hashlib.sha256(Path(file["name"]).read_bytes()).hexdigest() == file["sha256"]


# ---- identity and mixtures


def test_content_and_settings_decide_identity_but_names_do_not(tmp_path: Path):
    for name, text in (("a", "x"), ("b", "x"), ("c", "z")):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl([{"text": text, "t2": "y"}]))

    def digest(name: str, **fields) -> str:
        return JsonLines(paths=[str(tmp_path / name)], **fields).contents(FileHashes())["sha256"]

    assert digest("a.jsonl") == digest("b.jsonl")
    assert len({digest("a.jsonl"), digest("c.jsonl"), digest("a.jsonl", field="t2"), digest("*.jsonl")}) == 4


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_mixture_weights_must_fit(weights: list[float]):
    source = config_for(TextFiles, paths=["x"])
    with pytest.raises(ValueError, match=r"Mixture"):
        Mixture(sources=[source, source], weights=weights)
