"""From a recipe to a job: all that it needs is put into one folder, which Ray copies to the nodes that work for it."""

import json
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from corral.cluster.jobs.job import FOLDER_KEY, RESUME_KEY, Job, JobApi, list_jobs
from corral.cluster.jobs.job_code import JobCode, changed, collect_code, with_absolute_paths
from corral.cluster.jobs.job_entry import RECIPE, JobInstructions, check_resumable
from corral.data.plugins import did_you_mean
from corral.observe.run_folder import holds_run
from corral.recipe.errors import RunError, UserError, first_line
from corral.recipe.load import dump_recipe
from corral.recipe.memory import human_bytes
from corral.recipe.placement import runs_on_ray
from corral.recipe.rules import SET_BY_RAY
from corral.recipe.schema import Recipe

STOP_WAIT_S = 1800
"""For a job that is stopped to save its checkpoint. Ray's own default is 3 s."""
ENTRYPOINT = "exec python3 -m corral.cluster.jobs.job_entry"
"""`corral up` puts the Python that runs Corral first on the PATH; so does Ray, if a job has one of its own (`pip`)."""
PASSED_ON = (
    *("pip", "uv", "conda", "py_modules", "py_executable", "image_uri", "container", "excludes", "config"),
    *("worker_process_setup_hook", "nsight"),
)
"""Keys of a `runtime_env` that are passed on to Ray."""
KNOWN_KEYS = (*PASSED_ON, "env_vars", "working_dir")
RAYS_OWN = "RAY_"
"""Prefix of Ray's own variables. They are no secrets, and must be there when a process starts."""
HEADER = "corral environment"


@dataclass(frozen=True)
class JobRequest:
    recipe: Recipe
    folder: Path  # from which it is submitted; the recipe's paths are relative to it
    code: Path | None  # folder whose Python files are sent; None: the job runs in `folder`, which the nodes must see
    include: Sequence[str] = ()  # patterns of other files in it that are sent
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False  # only go on with a run that has a checkpoint
    resume_anyway: bool = False  # also where its model, data, reward, ... have changed


@dataclass(frozen=True)
class JobPackage:
    """What will be in the job's folder. `recipe`: with the names that things have there."""

    request: JobRequest
    recipe: Recipe
    code: JobCode
    notes: list[str]

    @property
    def run_folder(self) -> Path:
        return Path(self.recipe.logging.runs) / self.recipe.name

    def write(self, folder: Path, job: str, environment: str | None) -> None:
        for path, file in self.code.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / path)
        (folder / RECIPE).parent.mkdir(parents=True, exist_ok=True)
        (folder / RECIPE).write_text(dump_recipe(self.recipe))
        request = self.request
        JobInstructions(
            job=job,
            submitted_from=str(request.folder),
            is_folder_needed=request.code is None or not request.recipe.logging.folder.is_absolute(),
            runs_in_folder=request.code is None,
            run_folder=str(self.run_folder),
            must_resume=request.resume,
            resume_anyway=request.resume_anyway,
            environment=environment,
        ).write(folder)


def prepare(request: JobRequest) -> JobPackage:
    """Finds everything that can be found wrong here; nothing is sent yet."""
    recipe, notes = with_absolute_paths(request.recipe, request.folder), list[str]()
    if request.resume:
        if recipe.checkpoint.resume not in ("auto", "never"):
            raise UserError(
                "--resume goes on with the run of that name, and `checkpoint.resume` names another checkpoint"
            )
        recipe = changed(recipe, {("checkpoint", "resume"): "auto"})
    if recipe.cluster.address != "auto":
        notes.append(
            f"`cluster.address: {recipe.cluster.address}` is not used: a job runs on the cluster that it is sent to"
        )
        recipe = changed(recipe, {("cluster", "address"): "auto"})
    if runs_on_ray(recipe):
        names = list(dict.fromkeys([*recipe.cluster.environment, *request.variables]))
        recipe = changed(recipe, {("cluster", "environment"): names})
    else:
        notes.append("the recipe has no `cluster` section, so the run is one process on the head node")
    recipe, code = collect_code(recipe, request.folder, request.code, request.include)
    if code.root is None:
        notes.append(f"no code is sent; the job runs in {request.folder}")
    else:
        files = f"{len(code.files)} file{'s' * (len(code.files) != 1)}"
        notes.append(f"sends {files} of code, {human_bytes(code.num_bytes)}, of {code.root}")
    notes += [f"there is no module `{name}` here; it must be installed on the nodes" for name in code.missing]
    if request.variables:
        notes.append(f"sends the variables {', '.join(sorted(request.variables))}; their values are listed nowhere")
    return JobPackage(request, recipe, code, notes)


def submit(api: JobApi, package: JobPackage) -> tuple[str, list[str]]:
    """Returns the job's id, and notes for the user."""
    request, jobs = package.request, list_jobs(api)
    refuse_second(package, jobs)
    notes = notes_on_earlier_run(package) if api.is_on_head else []
    job, secret = new_id(package.recipe.name, jobs), f"corral-{secrets.token_hex(16)}.zip"
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **request.runtime_env.get("env_vars", {})}
    with tempfile.TemporaryDirectory(prefix="corral-job-") as folder:
        package.write(Path(folder), job, secret if request.variables else None)
        if request.variables:
            api.put_package(secret, pack_variables(request.variables))
        try:
            api.submit_job(
                entrypoint=ENTRYPOINT,
                submission_id=job,
                runtime_env={**request.runtime_env, "working_dir": folder, "env_vars": variables},
                metadata={FOLDER_KEY: str(package.run_folder), RESUME_KEY: package.recipe.checkpoint.resume},
            )
        except (ValueError, TypeError, OSError) as error:
            raise UserError(f"the job cannot be sent: {first_line(error)}") from error
        except RuntimeError as error:  # Ray answers with a traceback
            lines = [line.strip() for line in str(error).splitlines() if line.strip(" .")]
            raise RunError(f"the cluster does not take the job: {lines[-1].rstrip('.')}") from error
    return job, [*package.notes, *notes]


def refuse_second(package: JobPackage, jobs: Sequence[Job]) -> None:
    if package.recipe.checkpoint.resume == "never":
        return
    for job in jobs:
        if job.is_open and job.is_folder_sure and job.folder == str(package.run_folder):
            raise UserError(
                f"job {job.id} is {job.state} and writes {job.folder} already: `corral logs {job.id} -f` follows it, "
                f"`corral stop {job.id}` stops it; or give this run another name: name=..."
            )


def new_id(name: str, jobs: Sequence[Job]) -> str:
    """An id that says which run it is and when it was submitted."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-") or "run"
    base, taken = f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}", {job.id for job in jobs}
    return next(id for number in range(1, len(taken) + 2) if (id := base + f"-{number}" * (number > 1)) not in taken)


def notes_on_earlier_run(package: JobPackage) -> list[str]:
    """A note if there is a run to go on with. On the head only, because others may have another folder of that name;
    the job checks again."""
    folder = package.run_folder.expanduser()
    if package.request.resume:
        check_resumable(folder)
    if package.recipe.checkpoint.resume != "auto" or not holds_run(folder):
        return []
    return [f"{folder} holds a run already, and the job goes on with it; checkpoint.resume=never begins a new one"]


# --- the environment: only chosen variables are sent, and values never pass through Ray's `runtime_env`, its listings
# or a file; they are in the head's memory until the job takes them


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
