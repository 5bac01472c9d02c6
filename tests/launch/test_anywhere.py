"""The `plimsoll` command of an installed wheel, next to a user's own launch.py, framework.py, configs/ and tests/.

Also: the contents of the wheel and of the source distribution.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import ROOT

NAMES = ("launch.py", "framework.py", "configs/__init__.py", "tests/__init__.py")
DOCUMENTS = ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and a source distribution, built from the committed files of this checkout."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    # Building leaves files next to the sources, so copy them first.
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "plimsoll", source / "plimsoll", ignore=ignored)
    for name in ("pyproject.toml", "MANIFEST.in", *DOCUMENTS):
        shutil.copy(ROOT / name, source)
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", str(source)]
    subprocess.run(build, check=True, cwd=folder)
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    build = [sys.executable, "-c", code, str(folder)]
    subprocess.run(build, check=True, cwd=source, stdout=subprocess.DEVNULL)
    shutil.rmtree(source)
    return folder


@pytest.fixture(scope="module")
def bin_folder(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, which takes all other packages from this process's environment."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "env"], check=True, cwd=folder)
    python = folder / "env" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    install = [*PIP, "--python", str(python), "install", "--no-deps", "--no-compile", str(wheel)]
    subprocess.run(install, check=True, cwd=folder)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name in NAMES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"raise SystemExit('theirs: {name}')\n")
    (folder / "text").mkdir()
    for file in ("configs.md", "data.md"):
        shutil.copy(ROOT / "docs" / file, folder / "text")
    (folder / "mine.py").write_text("import plimsoll as pl\ndef tiny():\n    return pl.load_config('nanogpt-cpu')\n")
    return folder


@pytest.fixture(scope="module")
def run(bin_folder: Path, project: Path) -> Run:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{bin_folder}:/usr/bin:/bin",
            "HOME": str(bin_folder),
            "PYTHONPATH": str(project),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", ""),
        }
        return subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True, timeout=300)

    return run


SHORT = ["--config=mine.py:tiny", "--data=text", "--config.trainer.max_steps=2", "--config.trainer.eval_every=2"]
PLACE = ["--name=a", "--zone=z1", "--target=v5e-16"]
VERBS = {
    "configs": ["show", "mine.py:tiny"],
    "train": [*SHORT, "--workdir=run"],
    "local": [*SHORT, "--workdir=two", "--processes=2", "--config.mesh.data=2"],
    "status": ["--workdir=run"],
    "generate": ["--workdir=run", "--prompt=a", "--max_new_tokens=4"],
    "evaluate": ["--workdir=run", "--files", "text/data.md"],
    "prepare": [*SHORT, "--out=tokens"],
    "plan": ["--config=run/config.json", "--target=v5e-1", "--estimate"],
    "slurm": [*SHORT, "--workdir=run", "--dry_run"],
    "gke": [*SHORT, "--workdir=gs://bucket/a", "--target=v5e-16", "--image=x", "--dry_run"],
    "tpu_vm": ["run", *SHORT, "--workdir=gs://bucket/a", *PLACE, "--dry_run"],
    "compare": ["run", "two"],
    "calibrate": ["--help"],
    "ladder": ["--help"],
    "mup": ["--help"],
    "profile": ["--help"],
    "sweep": ["--help"],
    "chat": ["--help"],
    "export": ["--help"],
    "score": ["--help"],
    "sample": ["--help"],
}


@pytest.mark.pairs
def test_verbs_run_next_to_files_named_like_our_packages(run: Run, project: Path) -> None:
    listed = run("plimsoll")
    assert listed.returncode == 0, listed.stderr
    verbs = [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("  ")]
    assert sorted(verbs) == sorted(VERBS)
    for verb, words in VERBS.items():
        ran = run("plimsoll", verb, *words)
        assert ran.returncode == 0, (verb, ran.stdout, ran.stderr)
        assert "theirs" not in ran.stdout + ran.stderr, verb
    assert (project / "two" / "loss.png").exists()
    assert "usage: plimsoll sample " in ran.stdout
    # In the user's own program, these names are the user's modules.
    for name in ("launch", "framework", "configs"):
        assert f"theirs: {name}" in run("python", "-c", f"import {name}").stderr


@pytest.mark.pairs
def test_the_wheel_has_one_top_level_package(run: Run, project: Path) -> None:
    code = "import plimsoll as pl; print(pl.__version__, pl.Layer.__module__, pl.RMSNorm.__module__)"
    shown = run("python", "-c", code).stdout.split()
    assert shown[1:] == ["plimsoll.framework.layers.base", "plimsoll.framework.layers.norm"]
    assert run("plimsoll", "--version").stdout == f"plimsoll {shown[0]}\n"
    listed = run("python", "-m", "plimsoll", "configs", "list")
    assert listed.returncode == 0
    # A slow machine also shows the startup message.
    assert re.fullmatch(r"(starting configs [. \ds]{3,}\n)?", listed.stderr)


@pytest.mark.pairs
def test_distributions_contain_the_package_and_nothing_else(built: Path) -> None:
    package = {
        file.relative_to(ROOT).as_posix()
        for folder in ("", "framework", "configs", "launch", "api", "extras")
        for file in (ROOT / "plimsoll" / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {"plimsoll/py.typed", "plimsoll/framework/families/published.json", "plimsoll/launch/chat.html"} <= package
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert {name for name in names if ".dist-info/" not in name} == package
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nDescription-Content-Type: text/markdown\n" in metadata
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    others = {name for name in files - package if not name.startswith("plimsoll_train.egg-info/")}
    assert package <= files
    assert others == {"PKG-INFO", "setup.cfg", "pyproject.toml", "MANIFEST.in", *DOCUMENTS}


@pytest.mark.pairs
def test_the_old_import_name_is_an_alias_in_a_checkout() -> None:
    code = (
        "import framework as pl\nfrom framework.layers.norm import RMSNorm\nimport plimsoll\n"
        "assert pl is plimsoll and RMSNorm is plimsoll.RMSNorm\n"
        "print(plimsoll.framework.layers.norm.__spec__.name)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == "plimsoll.framework.layers.norm\n", ran.stderr
    assert ran.stderr.count("FutureWarning: `import framework` is deprecated; use `import plimsoll`") == 1


@pytest.mark.pairs
def test_a_copy_without_links_works(tmp_path: Path) -> None:
    for name in ("framework", "configs", "launch", "plimsoll/api", "plimsoll/extras"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (ROOT / "plimsoll").glob("*.py"):
        shutil.copy(file, tmp_path / "plimsoll")
    code = "import plimsoll as pl; print(pl.__file__, pl.RMSNorm.__module__, pl.load_config('nanogpt-cpu').model.dim)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.startswith(str(tmp_path)), ran.stderr
    assert " plimsoll.framework.layers.norm " in ran.stdout
