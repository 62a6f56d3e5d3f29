"""Every dependency has an upper bound, and what is installed is within it."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())


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
