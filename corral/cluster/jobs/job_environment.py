"""The environment variables of a job's processes. Only chosen ones are sent, and values never pass through Ray's
`runtime_env`, its listings or a file: they are in the head's memory until the job takes them."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from corral.data.plugins import did_you_mean
from corral.recipe.errors import UserError
from corral.recipe.rules import SET_BY_RAY

PASSED_ON = (
    *("pip", "uv", "conda", "py_modules", "py_executable", "image_uri", "container", "excludes", "config"),
    *("worker_process_setup_hook", "nsight"),
)
"""Keys of a `runtime_env` that are passed on to Ray."""
KNOWN_KEYS = (*PASSED_ON, "env_vars", "working_dir")
RAYS_OWN = "RAY_"
"""Prefix of Ray's own variables. They are no secrets, and must be there when a process starts."""
HEADER = "corral environment"


def chosen_variables(
    names: Sequence[str], options: Sequence[str], own: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Returns the variables to send, and the names in the recipe that have no value here. `names`: the recipe's
    (`cluster.environment`); `options`: of --env, NAME or NAME=VALUE; `own`: this environment."""
    found = {name: own[name] for name in names if name in own}
    for option in options:
        name, equals, value = option.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {name}: this is not the name of a variable; write --env NAME or --env NAME=VALUE")
        if name in SET_BY_RAY or name.startswith(RAYS_OWN):
            raise UserError(
                f"--env {name}: Ray sets it itself; what is meant for Ray goes into --runtime-env, `env_vars`"
            )
        if not equals and name not in own:
            raise UserError(f"--env {name}: it is not set here; set it, or write --env {name}=VALUE")
        found[name] = value if equals else own[name]
    return found, [name for name in names if name not in found]


def read_runtime_env(file: Path) -> tuple[dict[str, Any], dict[str, str], Path | None]:
    """Content of a YAML file: what is for Ray, all other variables in it, and the folder of code that it names."""
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--runtime-env {file}: it cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"--runtime-env {file}: it is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"--runtime-env {file}: it must be a mapping, such as `pip: [math-verify]`")
    for key in content:
        if key not in KNOWN_KEYS:
            near = did_you_mean(str(key), KNOWN_KEYS)
            raise UserError(f"--runtime-env {file}: `{key}` is not a key of a runtime_env{near}")
    variables = content.pop("env_vars", None) or {}
    if not isinstance(variables, dict):
        raise UserError(f"--runtime-env {file}: `env_vars` must be a mapping of names to values")
    code = content.pop("working_dir", None)
    if code is not None and (not isinstance(code, str) or "://" in code):
        raise UserError(
            f"--runtime-env {file}: `working_dir` must be a folder here, as with --code, because the recipe is sent "
            "with it; code that lies elsewhere goes into `py_modules`"
        )
    folder = None if code is None else (file.parent / Path(code).expanduser())
    texts = {str(name): str(value) for name, value in variables.items()}
    if for_ray := {name: value for name, value in texts.items() if name.startswith(RAYS_OWN)}:
        content["env_vars"] = for_ray
    return content, {name: value for name, value in texts.items() if name not in for_ray}, folder


def pack_variables(variables: Mapping[str, str]) -> bytes:
    """The header is what Ray would print of the package, should it not be able to store it."""
    return json.dumps([HEADER, dict(variables)]).encode()


def take_variables(package: str) -> dict[str, str]:
    """The variables that `pack_variables` packed, from the head's memory, where they are deleted."""
    from corral.cluster.gcs import Gcs, find_head

    gcs, key = Gcs(find_head()), f"gcs://{package}".encode()
    found = gcs.get_of_ray(key, None)
    if found is None:
        raise UserError("the environment that was sent with this job is gone: another process took it; submit it again")
    gcs.delete_of_ray(key, None)
    return dict(json.loads(found)[1])
