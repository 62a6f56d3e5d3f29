"""Tokens that others can read or guess are refused."""

from pathlib import Path

import pytest

from corral.http_server import read_token
from corral.recipe.errors import UserError
from corral.runtime.token import make_token, write_token


def test_a_token_that_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    token = make_token()
    assert read_token(tmp_path / ".corral" / "token") == token


@pytest.mark.parametrize(
    ("token", "mode", "problem"),
    [
        ("secret", 0o600, "has 6 characters, and a token that nobody guesses has 16 or more"),
        ("", 0o600, "is empty"),
        ("0123456789abcdef", 0o644, "every user of the machine can read the token file"),
    ],
)
def test_a_weak_or_open_token_is_refused(tmp_path: Path, token: str, mode: int, problem: str) -> None:
    file = tmp_path / "token"
    write_token(file, token)
    file.chmod(mode)
    with pytest.raises(UserError, match=problem):
        read_token(file)
