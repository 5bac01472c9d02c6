"""Checks a release, and prints its notes. Needs no other package; .github/workflows/release.yml uses it.

    python -m tools.release version
    python -m tools.release notes                  the section of CHANGELOG.md on this version
    python -m tools.release check --tag=v0.1.0     exits 1, with a line per problem, unless this can be released
    python -m tools.release stamp FILE ...         enters the version in CycloneDX files; cyclonedx-py cannot read it

CONTRIBUTING.md has the steps of a release.
"""

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path

import plimsoll

ROOT = Path(__file__).parents[1]


def find_notes(changelog: str, version: str) -> tuple[str, str]:
    """Return (what follows the version in its heading, the text of its section) of a changelog.

    Args:
        changelog: text with a section `## VERSION (DATE)` for each version.
        version: the version.

    Raises:
        LookupError: it has no such section, or the section is empty.
    """
    found = re.search(rf"^## {re.escape(version)}(?: \(([^)\n]*)\))?\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    if found is None or not found[2].strip():
        raise LookupError(f"CHANGELOG.md has no section `## {version}` with text")
    return found[1] or "", found[2].strip() + "\n"


def link_to_repository(notes: str, repository: str, tag: str) -> str:
    """Return notes whose links to files of the checkout lead to the repository, as a release's page is elsewhere."""
    return re.sub(r"\]\((?!https?:|#)", f"]({repository}/blob/{tag}/", notes)


def find_problems(tag: str, repository: str | None, root: Path = ROOT) -> list[str]:
    """Return the reasons, a line each, why a tag cannot be released.

    Args:
        tag: tag of the commit.
        repository: URL of the repository that releases it, or None to accept any.
        root: folder of the checkout.
    """
    version = plimsoll.__version__
    problems = []
    if tag != f"v{version}":
        problems.append(f"the tag is {tag}, but plimsoll/__init__.py has version {version}: expected v{version}")
    try:
        date, _ = find_notes((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
        if re.fullmatch(r"\d{4}-\d\d-\d\d", date) is None:
            problems.append(f"CHANGELOG.md: expected `## {version} (YEAR-MONTH-DAY)`, got ({date})")
    except LookupError as error:
        problems.append(str(error))
    cited = re.search(r"^version: (.*)$", (root / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    if cited is None or cited[1] != version:
        problems.append(f"CITATION.cff: expected version: {version}")
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    url = project.get("urls", {}).get("Repository")
    if url is None or (repository is not None and url != repository):
        problems.append(f"pyproject.toml: expected project.urls.Repository = {repository or 'the URL'}, got {url}")
    return problems


def main(argv: list[str] | None = None) -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version", help="print the version")
    notes = commands.add_parser("notes", help="print the section of CHANGELOG.md on this version")
    notes.add_argument("--repository", help="URL of the repository, to which relative links then lead")
    check = commands.add_parser("check", help="check that a tag can be released")
    check.add_argument("--tag", required=True, help="tag of the commit: v0.1.0")
    check.add_argument("--repository", help="URL of the repository that releases it")
    stamp = commands.add_parser("stamp", help="enter the version in bills of materials")
    stamp.add_argument("files", nargs="+", type=Path, help="CycloneDX files, in JSON")
    args = parser.parse_args(argv)
    if args.command == "version":
        print(plimsoll.__version__)
        return 0
    if args.command == "notes":
        _, text = find_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), plimsoll.__version__)
        if args.repository is not None:
            text = link_to_repository(text, args.repository, f"v{plimsoll.__version__}")
        print(text, end="")
        return 0
    if args.command == "stamp":
        for file in args.files:
            bill = json.loads(file.read_text(encoding="utf-8"))
            bill["metadata"]["component"]["version"] = plimsoll.__version__
            file.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
        return 0
    problems = find_problems(args.tag, args.repository)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
