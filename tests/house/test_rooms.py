"""The plan of the house: which room of `framework/` may import which, and that no imports go in a circle."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the ground floor up: a room, and the rooms below that it may import. docs/architecture.md says what is in each.
ROOMS = {
    "config": "",
    "layout": "",
    "terminal": "",
    "devices": "config layout terminal",
    "files": "terminal",
    "metrics": "files",
    "layers": "config layout",
    "data": "config files terminal",
    "objectives": "config layers layout",
    "models": "config layers layout",
    "optimizers": "config devices layout",
    "processes": "config files metrics terminal",
    "checkpoint": "config devices files layout metrics processes terminal",
    "learner": "config layers layout optimizers",
    "schedules": "config devices layers layout learner models optimizers",
    "program": "config data devices layers layout learner models optimizers processes schedules terminal",
    "inference": "data layers layout metrics program terminal",
    "plan": "checkpoint config data devices layers layout learner metrics models optimizers program schedules terminal",
    "functions": "checkpoint layers layout optimizers plan processes",
    "weights": "config files layers layout models program schedules terminal",
    "companions": "config data devices files inference layers layout learner models objectives processes program "
    "schedules terminal weights",
    "run": "checkpoint companions config data devices files inference layers layout learner metrics models plan "
    "processes program schedules terminal",
    "api": "checkpoint config data devices files inference layers learner metrics plan program run terminal weights",
}
# A package of the repository, and the others that it may import.
PACKAGES = {"framework": "", "configs": "framework", "launch": "framework configs"}


def modules(package: str) -> dict[str, Path]:
    """{dotted name: file} of all modules of a package, those of `__init__.py` by the package's name."""
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return dict(zip(names, files, strict=True))


def imports(file: Path) -> Iterator[str]:
    """The dotted names that a file imports, at its top or inside its functions; of `from a import b` it is a.b."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FRAMEWORK = modules("framework")


def room_of(name: str) -> str:
    """The room of a dotted name; "" for what is in none."""
    package, _, path = name.partition(".")
    return path.partition(".")[0] if package == "framework" else ""


def module_of(name: str) -> str:
    """The module that has what a dotted name leads to; the name itself where it is not of the framework."""
    return name.rpartition(".")[0] if name not in FRAMEWORK and name.rpartition(".")[0] in FRAMEWORK else name


def test_the_hall_is_empty():
    assert [path.name for path in (ROOT / "framework").iterdir() if path.is_file()] == ["__init__.py"]
    assert {room_of(name) for name in FRAMEWORK} - {""} == set(ROOMS)


def test_the_table_itself_goes_downwards():
    below: list[str] = []
    for room, others in ROOMS.items():
        assert set(others.split()) <= set(below), room
        below.append(room)


@pytest.mark.pairs
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_table_allows_and_no_more(room: str):
    """A room that is allowed and not used would make the table say less than it could."""
    names = {name for module, file in FRAMEWORK.items() if room_of(module) == room for name in imports(file)}
    assert {room_of(name) for name in names} - {"", room} == set(ROOMS[room].split())


@pytest.mark.pairs
def test_no_module_imports_itself_on_a_way_around():
    graph = {module: {module_of(name) for name in imports(file)} - {module} for module, file in FRAMEWORK.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.pairs
@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_downwards(package: str):
    allowed = {package, *PACKAGES[package].split()}
    ours = {*PACKAGES, "tools", "tests"}
    for file in modules(package).values():
        assert {name.partition(".")[0] for name in imports(file)} & ours <= allowed, file


def test_configs_of_older_versions_have_their_names():
    """Names that moved: their old modules are gone, and what they stand for is a component."""
    from framework.config import names
    from framework.config.components import is_component

    for old, new in names.RENAMED.items():
        assert is_component(names.resolve(old)), old
        assert names.name_of(names.resolve(old)) == new
