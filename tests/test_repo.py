"""What must be true of the files of the repository as a whole."""

import configparser
import re
import subprocess
from pathlib import Path

import pytest
from repo import ROOT

import moq_hf

MAX_BYTES = 2_000_000


def tracked_files() -> list[Path]:
    """Files that git knows or would add; without git (a source archive) there is nothing to check."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def texts(paths: list[Path]) -> dict[str, str]:
    """Repository path to content, of the files that are text."""
    found = {}
    for path in paths:
        try:
            found[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
    return found


def test_no_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<!\w)/(?:work|tmp|root|home|farm|Users)/\w")
    sources = {name: text for name, text in texts(tracked_files()).items() if not name.startswith("tests/")}
    assert [name for name, text in sources.items() if pattern.search(text)] == []


def test_nothing_is_left_to_do() -> None:
    pattern = re.compile(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b")
    sources = {name: text for name, text in texts(tracked_files()).items() if name != "tests/test_repo.py"}
    code = {name: text for name, text in sources.items() if name.endswith((".py", ".md", ".cfg", ".toml", "Makefile"))}
    assert [name for name, text in code.items() if pattern.search(text)] == []


def test_no_large_file() -> None:
    assert [path.name for path in tracked_files() if path.stat().st_size >= MAX_BYTES] == []


def test_the_changelog_has_the_version() -> None:
    assert re.search(rf"^## \[{re.escape(moq_hf.__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_each_public_name_has_an_example() -> None:
    for name in moq_hf.__all__:
        value = getattr(moq_hf, name)
        assert not callable(value) or ">>> " in (value.__doc__ or ""), name


def test_every_package_is_installed() -> None:
    folders = {path.parent for path in (ROOT / "moq_hf").rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)
    assert (ROOT / "moq_hf" / "py.typed").is_file()


def requirement_names(lines: str) -> set[str]:
    names = [re.match(r"[\w.-]+", line.strip()) for line in lines.splitlines()]
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name}


def test_what_the_tests_install_is_pinned() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    extras = setup["options.extras_require"]
    wanted, left = setup["options"]["install_requires"], ["dev"]
    while left:
        wanted += extras[left.pop()]
        left += [name for names in re.findall(r"^moq_hf\[(.+)\]$", wanted, re.MULTILINE) for name in names.split(",")]
        wanted = re.sub(r"^moq_hf\[.+\]$", "", wanted, flags=re.MULTILINE)
    assert {"datasets", "matplotlib", "trl"} <= requirement_names(wanted) <= requirement_names("\n".join(pins))
