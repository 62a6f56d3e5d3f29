"""The cluster's token: made on the head, taken by the workers from where it was left for them.

Each node keeps a copy that only its user can read, and everything on the node uses that.
"""

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from corral.recipe.errors import UserError
from corral.runtime.token import default_token

TOKEN_BYTES = 32


def known_token(given: Path | None, beside: Path | None, environment: Mapping[str, str]) -> str | None:
    """From --token-file, else Ray's variables, else the file beside the head file, else the default one."""
    if given is not None:
        return read(given)
    if environment.get("RAY_AUTH_TOKEN"):
        return environment["RAY_AUTH_TOKEN"].strip()
    if environment.get("RAY_AUTH_TOKEN_PATH"):
        return read(Path(environment["RAY_AUTH_TOKEN_PATH"]))
    for path in (beside, default_token()):
        if path is not None and path.is_file():
            return read(path)
    return None


def read(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise UserError(f"the token file {path} cannot be read: {error.strerror}") from error
    if not token:
        raise UserError(f"the token file {path} is empty")
    return token


def make_token() -> str:
    """A new one, left where the user's other commands find it."""
    token = secrets.token_hex(TOKEN_BYTES)
    write(default_token(), token)
    return token


def write(path: Path, token: str) -> None:
    """For the owner's eyes, from the first moment on, and never half of it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    os.replace(temporary, path)
