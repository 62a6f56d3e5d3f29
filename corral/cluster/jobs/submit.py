"""From a recipe to a job: all that it needs is put into one folder, which Ray copies to every node that works for
it."""

import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.cluster.jobs.job import FOLDER_KEY, RESUME_KEY, Job, list_jobs
from corral.cluster.jobs.job_api import JobApi
from corral.cluster.jobs.job_code import JobCode, changed, collect_code, with_absolute_paths
from corral.cluster.jobs.job_entry import RECIPE, JobInstructions, check_resumable
from corral.cluster.jobs.job_environment import pack_variables
from corral.observe.run_folder import holds_run
from corral.recipe.errors import RunError, UserError, first_line
from corral.recipe.load import dump_recipe
from corral.recipe.memory import human_bytes
from corral.recipe.placement import runs_on_ray
from corral.recipe.schema import Recipe

STOP_WAIT_S = 1800
"""For a job that is stopped to save its checkpoint. Ray's own default is 3 s."""
ENTRYPOINT = "exec python3 -m corral.cluster.jobs.job_entry"
"""`corral up` puts the Python that runs Corral first on the PATH; so does Ray, if a job has one of its own (`pip`)."""


@dataclass(frozen=True)
class JobRequest:
    recipe: Recipe
    folder: Path  # from which it is submitted; the recipe's paths are relative to it
    code: Path | None  # folder whose Python files are sent; None: the job runs in `folder`, which the nodes must see
    include: Sequence[str] = ()  # patterns of other files in it that are sent
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False  # only go on with a run that has a checkpoint


@dataclass(frozen=True)
class SubmittedJob:
    id: str
    folder: Path  # of its run
    notes: list[str]


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


def submit(api: JobApi, package: JobPackage) -> SubmittedJob:
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
    return SubmittedJob(job, package.run_folder, [*package.notes, *notes])


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
