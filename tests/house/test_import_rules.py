"""Import rules: which package of `framework/` may import which, and that no imports form a cycle."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the bottom up: each package of `framework/` and the packages that it may import. docs/architecture.md describes
# the contents of each.
ALLOWED_IMPORTS = {
    "config": "",
    "layout": "",
    "terminal": "",
    "devices": "config layout terminal",
    "files": "terminal",
    "metrics": "devices files terminal",
    "layers": "config layout",
    "data": "config files terminal",
    "objectives": "config layers layout",
    "models": "config layers layout",
    "optimizers": "config devices layout",
    "processes": "config devices files metrics terminal",
    "checkpoint": "config devices files layout metrics processes terminal",
    "learner": "config layers layout optimizers",
    "schedules": "config devices layers layout learner models optimizers terminal",
    "program": "config data devices layers layout learner models optimizers processes schedules terminal",
    "inference": "data layers layout metrics program terminal",
    "weights": "config files layers layout learner models program terminal",
    "families": "config files layers models weights",
    "plan": "checkpoint config data devices families layers layout learner metrics models processes program schedules "
    "terminal",
    "batch_transforms": "config data devices families files inference layers layout learner models objectives "
    "processes program schedules terminal weights",
    "run": "checkpoint batch_transforms config data devices files inference layers layout learner metrics models plan "
    "processes program schedules terminal",
}
# Each package of `plimsoll` and the others that it may import.
PACKAGES = {
    "framework": "",
    "extras": "framework",
    "configs": "framework extras",
    "api": "framework extras configs",
    "launch": "framework extras configs api",
}
# Each optional package in `plimsoll/extras/` and the others that it may import.
EXTRAS = {
    "functions": "",
    "flows": "",
    "calibration": "",
    "plan_page": "",
    "autotune": "",
    "largest": "autotune",
    "scaling": "largest",
    "other_frameworks": "",
}


def modules(package: str) -> dict[str, Path]:
    """Return {dotted name below `plimsoll`: file} of a package; an `__init__.py` has the name of its package."""
    files = sorted((ROOT / "plimsoll" / package).rglob("*.py"))
    names = [file.relative_to(ROOT / "plimsoll").with_suffix("").parts for file in files]
    return {".".join(parts).removesuffix(".__init__"): file for parts, file in zip(names, files, strict=True)}


def imports(file: Path, *, with_types: bool = True) -> Iterator[str]:
    """Yield the names in `plimsoll` that a file imports, also in functions; `from a import b` yields a.b.

    Args:
        file: file with Python code.
        with_types: include imports that only type checkers see.
    """
    tree = ast.parse(file.read_text())
    type_blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and is_type_checking(node.test)]
    type_nodes = set() if with_types else {one for block in type_blocks for one in ast.walk(block)}
    names = []
    for node in ast.walk(tree):
        if node in type_nodes:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    yield from (name.removeprefix("plimsoll.") for name in names if name.startswith("plimsoll."))


def is_type_checking(test: ast.expr) -> bool:
    """Return whether the test of an `if` is `TYPE_CHECKING`."""
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


FRAMEWORK = modules("framework")


def get_package(name: str) -> str:
    """Return the package of `framework/` that a dotted name is in, or "" if there is none."""
    package, _, path = name.partition(".")
    return path.partition(".")[0] if package == "framework" else ""


def get_module(name: str) -> str:
    """Return the module that defines a dotted name, or the name itself if it is not in the framework."""
    return name.rpartition(".")[0] if name not in FRAMEWORK and name.rpartition(".")[0] in FRAMEWORK else name


def test_top_level_package_has_no_code():
    assert [path.name for path in (ROOT / "framework").iterdir() if path.is_file()] == ["__init__.py"]
    assert {get_package(name) for name in FRAMEWORK} - {""} == set(ALLOWED_IMPORTS)


def test_import_table_is_acyclic():
    below: list[str] = []
    for room, others in ALLOWED_IMPORTS.items():
        assert set(others.split()) <= set(below), room
        below.append(room)


@pytest.mark.pairs
@pytest.mark.parametrize("package", ALLOWED_IMPORTS)
def test_packages_import_only_what_the_table_allows(package: str):
    """Each package imports exactly what the table allows: an allowed import that is unused would weaken the rule."""
    names = {name for module, file in FRAMEWORK.items() if get_package(module) == package for name in imports(file)}
    assert {get_package(name) for name in names} - {"", package} == set(ALLOWED_IMPORTS[package].split())


@pytest.mark.pairs
def test_no_import_cycles():
    graph = {
        module: {get_module(name) for name in imports(file, with_types=False)} - {module}
        for module, file in FRAMEWORK.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.pairs
@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_downwards(package: str):
    allowed = {package, *PACKAGES[package].split()}
    for file in modules(package).values():
        assert {name.partition(".")[0] for name in imports(file)} & {*PACKAGES} <= allowed, file


@pytest.mark.pairs
def test_optional_packages_import_each_other_only_as_listed():
    found = {package.name for package in (ROOT / "plimsoll/extras").iterdir() if (package / "__init__.py").exists()}
    assert found == {*EXTRAS}
    for package, others in EXTRAS.items():
        files = modules(f"extras/{package}").values()
        names = {name for file in files for name in imports(file) if name.startswith("extras.")}
        assert {name.split(".")[1] for name in names} - {package} == {*others.split()}


@pytest.mark.pairs
def test_nothing_imports_the_launchers_of_clusters():
    launchers = {f"launch.{name}" for name in ("slurm", "gke", "tpu_vm", "local")}
    for package in PACKAGES:
        for name, file in modules(package).items():
            imported = {".".join(one.split(".")[:2]) for one in imports(file)}
            assert not imported & (launchers - {name}), file


@pytest.mark.pairs
def test_no_package_imports_tools_or_imports_by_a_computed_name():
    """Imports that the tables above cannot see: a name in a string, or a package that is not installed."""
    found = []
    for package in PACKAGES:
        for file in modules(package).values():
            text = file.read_text()
            found += [
                f"{file}: {line}" for line in text.splitlines() if re.match(r"\s*(from|import) (tools|tests)\b", line)
            ]
            if re.search(r"import_module\(|spec_from_file_location\(|__import__\(", text):
                found.append(file.relative_to(ROOT / "plimsoll").as_posix())
    # Each of these imports what a user or a component name asks for, or all modules of its package.
    assert found == [
        "framework/batch_transforms/reward_function.py",
        "framework/config/components.py",
        "framework/config/names.py",
        "framework/families/registry.py",
        "configs/__init__.py",
        "launch/__main__.py",
        "launch/local.py",
    ]


def test_names_in_older_configs_resolve():
    """Names that have changed still resolve to components, whatever the module that had them."""
    from plimsoll.framework.config import names
    from plimsoll.framework.config.components import is_component

    for old, new in names.RENAMED.items():
        component = names.resolve(f"framework.any.module.{old}")
        assert is_component(component)
        assert names.get_dotted_name(component) == f"plimsoll.{new}"
        assert names.resolve(f"plimsoll.{old}") is component
    assert names.get_dotted_name(names.resolve("framework.compiler.Compiler")) == "plimsoll.Compiler"
    assert names.get_dotted_name(names.resolve("configs.families.llama.Llama")) == "plimsoll.Llama"
