"""The token of a Ray cluster: who has it may run anything on the cluster, who has not may not even query it.

The head makes it, and the workers take it from where it was left for them. Each node keeps a copy that only its user
can read. It is passed to Ray in a file, not in a variable: the environment of a process is shown in more places than
one expects.
"""

import os
import secrets
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from corral.http_server import TOKEN_BYTES, check_token, read_token
from corral.runtime.membership import Membership

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def default_token() -> Path:
    """File in which the head leaves the token and other commands look for it; nodes that share a home directory all
    find it."""
    return Path.home() / ".corral" / "token"


def find_token(given: Path | None, beside: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token in the file of --token-file, else of Ray's variables, else `beside` the head file, else the default."""
    if given is not None:
        return read_token(given)
    if environment.get("RAY_AUTH_TOKEN"):
        return check_token(environment["RAY_AUTH_TOKEN"].strip(), "RAY_AUTH_TOKEN")
    if environment.get("RAY_AUTH_TOKEN_PATH"):
        return read_token(Path(environment["RAY_AUTH_TOKEN_PATH"]))
    for path in (beside, default_token()):
        if path is not None and path.is_file():
            return read_token(path)
    return None


def make_token() -> str:
    """A new token, written to the default file, where the user's other commands find it."""
    token = secrets.token_hex(TOKEN_BYTES)
    write_token(default_token(), token)
    return token


def write_token(path: Path, token: str) -> None:
    """Writes it so that at no moment another user can read it, or anyone half of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # with mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    os.replace(temporary, path)


def use_token_of(member: Membership | None) -> None:
    """Uses the token of the cluster that this node is part of; else what Ray's own variables say; else the default."""
    if member is not None:
        use_token(None if member.token_file is None else Path(member.token_file))
    elif any(os.environ.get(name) for name in VARIABLES[1:]):
        os.environ.setdefault(VARIABLES[0], "token")
        reload_token()
    elif VARIABLES[0] not in os.environ and default_token().is_file():
        use_token(default_token())


def use_token(token_file: Path | None) -> None:
    """Uses the token from here on, in this process and those that it starts. None: no token."""
    os.environ.update(token_variables(token_file))
    os.environ.pop("RAY_AUTH_TOKEN", None)
    reload_token()


def token_variables(token_file: Path | None) -> dict[str, str]:
    if token_file is None:
        return {"RAY_AUTH_MODE": "disabled"}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}


def reload_token() -> None:
    """Makes Ray read its environment again: it does so when it is loaded, and keeps what it read."""
    if "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
