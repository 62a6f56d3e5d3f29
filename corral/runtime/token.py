"""Ray's token: who has it may run anything on the cluster, who has not may not even ask.

It is handed to Ray in a file, not in a variable: the environment of a process is shown in more places than one expects.
"""

import os
import sys
from pathlib import Path

from corral.runtime.membership import Membership

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def default_token() -> Path:
    """Where the head leaves it, and other commands look for it; on a home directory that all nodes share they find
    it."""
    return Path.home() / ".corral" / "token"


def use_token_of(member: Membership | None) -> None:
    """That of the cluster which this node is part of; else whatever Ray's own variables say; else the default one."""
    if member is not None:
        use_token(None if member.token_file is None else Path(member.token_file))
    elif any(os.environ.get(name) for name in VARIABLES[1:]):
        os.environ.setdefault(VARIABLES[0], "token")
        reread()
    elif VARIABLES[0] not in os.environ and default_token().is_file():
        use_token(default_token())


def use_token(token_file: Path | None) -> None:
    """From here on, in this process and those that it starts. None: no token."""
    os.environ.update(variables(token_file))
    os.environ.pop("RAY_AUTH_TOKEN", None)
    reread()


def variables(token_file: Path | None) -> dict[str, str]:
    if token_file is None:
        return {"RAY_AUTH_MODE": "disabled"}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}


def reread() -> None:
    """Ray reads its environment when it is loaded, and keeps what it read."""
    if "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
