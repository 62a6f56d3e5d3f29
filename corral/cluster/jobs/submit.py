"""From a recipe to a job: all that it needs is put into one folder, which Ray copies to the nodes that work for it."""

import importlib.machinery
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from corral.cluster.jobs.job import FOLDER_KEY, RESUME_KEY, Job, JobApi, list_jobs
from corral.cluster.jobs.job_entry import RECIPE, JobInstructions, check_resumable
from corral.data.plugins import did_you_mean, is_spec
from corral.data.sources import GENERATORS
from corral.observe.run_folder import holds_run
from corral.recipe.errors import RunError, UserError, first_line
from corral.recipe.keys import KeyPath, dotted
from corral.recipe.load import dump_recipe
from corral.recipe.memory import human_bytes
from corral.recipe.placement import runs_on_ray
from corral.recipe.rules import SET_BY_RAY
from corral.recipe.schema import Recipe, Section, Source

STOP_WAIT_S = 1800
"""For a job that is stopped to save its checkpoint. Ray's own default is 3 s."""
ENTRYPOINT = "exec python3 -m corral.cluster.jobs.job_entry"
"""`corral up` puts the Python that runs Corral first on the PATH; so does Ray, if a job has one of its own (`pip`)."""
PYTHON_SUFFIXES = (".py", ".pyi")
TEXT_SUFFIXES = (".txt", ".md", ".jinja", ".jinja2", ".j2")
"""What code reads beside itself: word lists, prompts, templates. Not .json and .yaml, in which people also keep
secrets; those are sent if they are named."""
MAX_TEXT_BYTES = 1 << 20  # of one such file; larger ones are data, which is not sent
MAX_BYTES = 32 << 20
MAX_FILES = 10_000
MAX_SEEN = 200_000  # files that are looked at before the folder is refused
NEVER = ("__pycache__", "node_modules", "site-packages", "venv", "wandb", "mlruns")
ELSEWHERE = ".corral/code"  # in the job's folder: for files that are not below the folder that is sent
NUM_LARGEST = 5
WHAT_TO_DO = "submit from the folder of your code, choose another with --code DIR, or send none with --no-code"
AnySection = TypeVar("AnySection", bound=Section)
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


@dataclass
class JobCode:
    root: Path | None
    files: dict[str, Path] = field(default_factory=dict)  # by their path in the job's folder
    missing: list[str] = field(default_factory=list)  # modules that are not here; the cluster may have them

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())


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
            is_folder_needed=request.code is None or not Path(request.recipe.logging.runs).is_absolute(),
            runs_in_folder=request.code is None,
            run_folder=str(self.run_folder),
            must_resume=request.resume,
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
    folder = package.run_folder
    if package.request.resume:
        check_resumable(folder)
    if package.recipe.checkpoint.resume != "auto" or not holds_run(folder):
        return []
    return [f"{folder} holds a run already, and the job goes on with it; checkpoint.resume=never begins a new one"]


# --- the code that is sent: Python files of a folder, and what the recipe names outside of it; and the recipe, with
# names and paths that mean the same in the job's folder


def collect_code(
    recipe: Recipe, folder: Path, root: Path | None, include: Sequence[str] = ()
) -> tuple[Recipe, JobCode]:
    """The code of a recipe that was submitted from `folder`, with the files of `root`; and the recipe, with names by
    which it is found in the job's folder. Without `root` nothing is sent, and the job runs in `folder`."""
    code = JobCode(root)
    if root is not None:
        if root.resolve() in (Path.home().resolve(), Path("/")):
            raise UserError(f"all of {root} would be sent along: {WHAT_TO_DO}")
        code.files.update(files_of(root, skip=Path(recipe.logging.runs)))
        for pattern in include:
            code.files.update(matching_files(root, pattern))
    changes = {key: add_spec(code, dotted(key), spec, folder) for key, spec in code_specs(recipe).items()}
    total = code.num_bytes
    if total > MAX_BYTES or len(code.files) > MAX_FILES:
        largest = sorted(code.files.values(), key=lambda file: file.stat().st_size, reverse=True)[:NUM_LARGEST]
        names = ", ".join(f"{file} ({human_bytes(file.stat().st_size)})" for file in largest)
        raise UserError(
            f"{len(code.files)} files of code are {human_bytes(total)}, and at most {MAX_FILES} files and "
            f"{human_bytes(MAX_BYTES)} are sent along; the largest are {names}. {WHAT_TO_DO.capitalize()}"
        )
    return changed(recipe, changes), code


def code_specs(recipe: Recipe) -> Mapping[KeyPath, str]:
    """Every `module:name` and `file.py:name` of the recipe."""
    names: dict[KeyPath, str | list[str]] = {("data", "train", "path"): recipe.data.train.path, **recipe.code_names}
    if recipe.data.validation is not None:
        names["data", "validation", "path"] = recipe.data.validation.path
    specs = {key: name for key, name in names.items() if isinstance(name, str) and is_spec(name)}
    return {key: name for key, name in specs.items() if name.partition(":")[0] not in ("hf", *GENERATORS)}


def add_spec(code: JobCode, key: str, spec: str, folder: Path) -> str:
    """The name that a spec has in the job's folder, to which its file or module is added where it is missing."""
    location, _, name = spec.rpartition(":")
    if not location.endswith(".py"):
        if code.root is not None:
            add_module(code, location.partition(".")[0], folder)
        return spec
    candidates = [base / Path(location).expanduser() for base in (folder, code.root) if base is not None]
    file = next((candidate.resolve() for candidate in candidates if candidate.is_file()), None)
    if file is None:
        siblings = [sibling.name for sibling in candidates[0].parent.glob("*.py")]
        raise UserError(f"{key}: no file {candidates[0]}{did_you_mean(Path(location).name, siblings)}")
    if code.root is None:
        return f"{file}:{name}"
    if file.is_relative_to(code.root.resolve()):
        inside = file.relative_to(code.root.resolve()).as_posix()
        code.files[inside] = file
        return f"{inside}:{name}"
    number = len({path.split("/")[2] for path in code.files if path.startswith(f"{ELSEWHERE}/")})
    beside = f"{ELSEWHERE}/{number}"
    code.files.update({f"{beside}/{other.name}": other for other in file.parent.glob("*.py")})
    return f"{beside}/{file.name}:{name}"


def add_module(code: JobCode, name: str, folder: Path) -> None:
    """Adds a module, unless it is in the folder that is sent, or installed: every node must have installed packages."""
    if f"{name}.py" in code.files or any(path.startswith(f"{name}/") for path in code.files):
        return
    found = importlib.machinery.PathFinder.find_spec(name, [*sys.path, str(folder)])
    if found is None:
        if name not in sys.builtin_module_names:
            code.missing.append(name)
    elif found.submodule_search_locations:
        for location in map(Path, found.submodule_search_locations):
            if not is_installed(location):
                code.files.update({f"{name}/{path}": file for path, file in files_of(location).items()})
    elif found.origin is not None and found.origin.endswith(".py") and not is_installed(Path(found.origin)):
        code.files[f"{name}.py"] = Path(found.origin)


def is_installed(path: Path) -> bool:
    packages, standard = {"site-packages", "dist-packages"}, Path(os.__file__).parent.resolve()
    return bool(packages.intersection(path.parts)) or path.resolve().is_relative_to(standard)


def files_of(root: Path, skip: Path | None = None) -> dict[str, Path]:
    """Python files and small texts, by their path below `root`. Not of hidden folders, environments, caches, runs."""
    return {file.relative_to(root).as_posix(): file for file in walk(root, skip)}


def walk(root: Path, skip: Path | None) -> Iterator[Path]:
    num_seen = 0
    for parent, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not is_left_out(Path(parent, name), skip))
        for name in sorted(names):
            num_seen += 1
            if num_seen > MAX_SEEN:
                raise UserError(f"{root} has more than {MAX_SEEN} files: {WHAT_TO_DO}")
            file = Path(parent, name)
            if name.startswith(".") or file.suffix not in (*PYTHON_SUFFIXES, *TEXT_SUFFIXES) or not file.is_file():
                continue
            if file.suffix in PYTHON_SUFFIXES or file.stat().st_size <= MAX_TEXT_BYTES:
                yield file


def is_left_out(folder: Path, skip: Path | None) -> bool:
    if folder.name.startswith(".") or folder.name in NEVER or (skip is not None and folder.resolve() == skip.resolve()):
        return True
    return (folder / "pyvenv.cfg").exists() or holds_run(folder)


def matching_files(root: Path, pattern: str) -> dict[str, Path]:
    try:
        found = [file for file in root.glob(pattern) if file.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"--include {pattern}: this is not a pattern of files below {root}: {error}") from error
    if not found:
        raise UserError(f"--include {pattern}: no file below {root} matches")
    return {file.relative_to(root).as_posix(): file for file in found}


def with_absolute_paths(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with its relative paths as they are seen from `folder`, so that it means the same in another one. What
    begins with `~` stays: the home directory is the one where the run will be. Paths need not exist here."""
    changes: dict[KeyPath, Any] = {
        ("logging", "runs"): str(folder / recipe.logging.runs),
        ("model", "path"): model_path(recipe.model.path, folder),
        ("data", "train", "path"): source_path(recipe.data.train, folder),
    }
    if recipe.data.validation is not None:
        changes["data", "validation", "path"] = source_path(recipe.data.validation, folder)
    for role in ("critic", "reference"):
        if (path := getattr(recipe, role).path) is not None:
            changes[role, "path"] = model_path(path, folder)
    if recipe.checkpoint.resume not in ("auto", "never"):
        changes["checkpoint", "resume"] = absolute_path(recipe.checkpoint.resume, folder)
    template = recipe.model.chat_template
    if template is not None and "{" not in template and (folder / template).is_file():
        # Workers on other nodes do not see the file, so its text is sent.
        changes["model", "chat_template"] = (folder / template).read_text()
    return changed(recipe, changes)


def changed(section: AnySection, changes: Mapping[KeyPath, Any]) -> AnySection:
    """A copy with other values at some keys. Values that stay the same do not count as written in the recipe."""
    update: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in changes):
        below = {path[1:]: value for path, value in changes.items() if path[0] == name}
        old = getattr(section, name)
        new = below[()] if () in below else changed(old, below)
        if new != old:
            update[name] = new
    return section.model_copy(update=update)


def absolute_path(path: str, folder: Path) -> str:
    return path if path.startswith("~") else str(folder / path)


def model_path(path: str, folder: Path) -> str:
    """The name of a model on a hub looks like a relative path, and stays."""
    is_folder = path.startswith(".") or path.count("/") > 1 or (folder / path).is_dir()
    return absolute_path(path, folder) if is_folder else path


def source_path(source: Source, folder: Path) -> str | list[str]:
    if isinstance(source.path, list):
        return [absolute_path(path, folder) for path in source.path]
    kind, _, name = source.path.partition(":")
    if kind == "hf" and name and (folder / name).is_dir():
        return f"hf:{folder / name}"
    return source.path if kind in GENERATORS or is_spec(source.path) else absolute_path(source.path, folder)


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
