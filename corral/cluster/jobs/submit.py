"""From a recipe to a job: what it needs is put into one folder, which Ray copies to every node that works for it."""

import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.cluster.jobs.code import Code, gather, size_in_words
from corral.cluster.jobs.dashboard import JobApi
from corral.cluster.jobs.environment import pack
from corral.cluster.jobs.instructions import RECIPE, Instructions, check_resumable
from corral.cluster.jobs.job import FOLDER_KEY, RESUME_KEY, Job, list_jobs
from corral.cluster.jobs.paths import anchored, changed
from corral.observe.run_folder import holds_run
from corral.recipe.errors import RunError, UserError, first_line
from corral.recipe.load import dump_recipe
from corral.recipe.placement import runs_on_ray
from corral.recipe.schema import Recipe

STOP_WAIT_S = 1800
"""For a job that was told to stop to save its checkpoint. Ray's own default is 3 s."""
ENTRYPOINT = "exec python3 -m corral.cluster.jobs.entry"
"""`corral up` puts the Python that runs Corral first on the path; so does Ray, if a job has one of its own (`pip`)."""


@dataclass(frozen=True)
class Order:
    """What is to be run, and how."""

    recipe: Recipe
    folder: Path
    """From which it is submitted; the recipe's paths are relative to it."""
    code: Path | None
    """The folder whose Python files are sent. None: the job runs in `folder`, which the nodes must see."""
    include: Sequence[str] = ()
    """Patterns of other files in it that are sent."""
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    """Only go on with a run that has a checkpoint."""


@dataclass(frozen=True)
class Submitted:
    id: str
    folder: Path
    """Of its run."""
    notes: list[str]


@dataclass(frozen=True)
class Package:
    """What will be in the job's folder."""

    order: Order
    recipe: Recipe
    """With the names that things have there."""
    code: Code
    notes: list[str]

    @property
    def run_folder(self) -> Path:
        return Path(self.recipe.logging.runs) / self.recipe.name


def prepare(order: Order) -> Package:
    """Everything that can be found wrong here is; nothing is sent yet."""
    recipe, notes = anchored(order.recipe, order.folder), list[str]()
    if order.resume:
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
        names = list(dict.fromkeys([*recipe.cluster.environment, *order.variables]))
        recipe = changed(recipe, {("cluster", "environment"): names})
    else:
        notes.append("the recipe has no `cluster` section, so the run is one process on the head node")
    recipe, code = gather(recipe, order.folder, order.code, order.include)
    if code.root is None:
        notes.append(f"no code is sent; the job runs in {order.folder}")
    else:
        files = f"{len(code.files)} file{'s' * (len(code.files) != 1)}"
        notes.append(f"sends {files} of code, {size_in_words(code.num_bytes)}, of {code.root}")
    notes += [f"there is no module `{name}` here; it must be installed on the nodes" for name in code.missing]
    if order.variables:
        notes.append(f"sends the variables {', '.join(sorted(order.variables))}; their values are listed nowhere")
    return Package(order, recipe, code, notes)


def submit(api: JobApi, package: Package) -> Submitted:
    order, jobs = package.order, list_jobs(api)
    refuse_second(package, jobs)
    notes = earlier_run(package) if api.is_here else []
    job, secret = new_id(package.recipe.name, jobs), f"corral-{secrets.token_hex(16)}.zip"
    with tempfile.TemporaryDirectory(prefix="corral-job-") as folder:
        write(package, Path(folder), job, secret if order.variables else None)
        if order.variables:
            api.put_package(secret, pack(order.variables))
        try:
            api.submit_job(
                entrypoint=ENTRYPOINT,
                submission_id=job,
                runtime_env=runtime_env(order, Path(folder)),
                metadata={FOLDER_KEY: str(package.run_folder), RESUME_KEY: package.recipe.checkpoint.resume},
            )
        except (ValueError, TypeError, OSError) as error:
            raise UserError(f"the job cannot be sent: {first_line(error)}") from error
        except RuntimeError as error:
            raise RunError(f"the cluster does not take the job: {last_line(error)}") from error
    return Submitted(job, package.run_folder, [*package.notes, *notes])


def refuse_second(package: Package, jobs: Sequence[Job]) -> None:
    if package.recipe.checkpoint.resume == "never":
        return
    for job in jobs:
        if job.is_open and job.is_folder_sure and job.folder == str(package.run_folder):
            raise UserError(
                f"job {job.id} is {job.state} and writes {job.folder} already: `corral logs {job.id} -f` follows it, "
                f"`corral stop {job.id}` stops it; or give this run another name: name=..."
            )


def new_id(name: str, jobs: Sequence[Job]) -> str:
    """Tells people which run it is and when it was sent."""
    plain = re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-") or "run"
    base, taken = f"{plain}-{time.strftime('%Y%m%d-%H%M%S')}", {job.id for job in jobs}
    return next(id for number in range(1, len(taken) + 2) if (id := base + f"-{number}" * (number > 1)) not in taken)


def write(package: Package, folder: Path, job: str, secret: str | None) -> None:
    for path, file in package.code.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, folder / path)
    (folder / RECIPE).parent.mkdir(parents=True, exist_ok=True)
    (folder / RECIPE).write_text(dump_recipe(package.recipe))
    order = package.order
    Instructions(
        job=job,
        submitted_from=str(order.folder),
        is_folder_needed=order.code is None or not Path(order.recipe.logging.runs).is_absolute(),
        runs_in_folder=order.code is None,
        run_folder=str(package.run_folder),
        must_resume=order.resume,
        environment=secret,
    ).write(folder)


def runtime_env(order: Order, folder: Path) -> dict[str, Any]:
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **order.runtime_env.get("env_vars", {})}
    return {**order.runtime_env, "working_dir": str(folder), "env_vars": variables}


def earlier_run(package: Package) -> list[str]:
    """Says whether there is a run to go on with. On the head only, because others may have another folder of that name;
    the job looks again."""
    folder = package.run_folder
    if package.order.resume:
        check_resumable(folder)
    if package.recipe.checkpoint.resume != "auto" or not holds_run(folder):
        return []
    return [f"{folder} holds a run already, and the job goes on with it; checkpoint.resume=never begins a new one"]


def last_line(error: Exception) -> str:
    """Ray answers with a traceback."""
    return [line.strip() for line in str(error).splitlines() if line.strip(" .")][-1].rstrip(".")
