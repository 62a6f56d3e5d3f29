"""`corral submit`, `jobs`, `logs` and `stop`: runs that the cluster does by itself."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from corral.cli.planning import AsJson, Overrides, RecipeFile, planned
from corral.recipe.errors import RunError, UserError

if TYPE_CHECKING:
    from corral.cluster.jobs.job import JobApi

DashboardAddress = Annotated[
    str | None,
    typer.Option("--address", help="URL of the cluster's dashboard, http://HEAD:8265, if not this node's own."),
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, or the beginning of it.")]


def submit(
    recipe: RecipeFile,
    overrides: Overrides = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not follow the job's output.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Only go on with a run that has a checkpoint.")] = False,
    env: Annotated[list[str] | None, typer.Option(help="Variable for the job and workers: NAME or NAME=VALUE.")] = None,
    runtime_env: Annotated[Path | None, typer.Option(help="A YAML file with a runtime_env for Ray (pip, ...).")] = None,
    code: Annotated[Path | None, typer.Option(help="The folder whose Python files are sent, if not this one.")] = None,
    include: Annotated[list[str] | None, typer.Option(help="Other files to send, such as 'prompts/*.json'.")] = None,
    no_code: Annotated[
        bool, typer.Option("--no-code", help="Send none; run in this folder, which nodes must see.")
    ] = False,
    address: DashboardAddress = None,
) -> None:
    """Train on a cluster as the recipe says, whether or not this terminal stays open. Sends the recipe and its code."""
    from corral.cluster.jobs.job import open_jobs
    from corral.cluster.jobs.submit import JobRequest, chosen_variables, prepare, read_runtime_env
    from corral.cluster.jobs.submit import submit as submit_package

    loaded, plan = planned(recipe, overrides)
    for warning in plan.warnings:
        print(f"warning: {warning}")
    for_ray, its_variables, its_code = ({}, {}, None) if runtime_env is None else read_runtime_env(runtime_env)
    if (code is not None) + (its_code is not None) + no_code > 1:
        raise UserError("say once which code is sent: --code, --no-code, or `working_dir` of --runtime-env")
    if no_code and include:
        raise UserError("--include has no effect with --no-code, which sends nothing")
    given = code or its_code
    if given is not None and not given.is_dir():
        raise UserError(f"{given} is not a folder")
    variables, unset = chosen_variables(loaded.cluster.environment, env or [], os.environ)
    for name in unset:
        print(f"note: `cluster.environment`: {name} is not set here; the nodes keep their own")
    request = JobRequest(
        recipe=loaded,
        folder=Path.cwd(),
        code=None if no_code else (given or Path.cwd()).resolve(),
        include=include or (),
        variables={**its_variables, **variables},
        runtime_env=for_ray,
        resume=resume,
    )
    package = prepare(request)
    api = open_jobs(address)
    job, notes = submit_package(api, package)
    for note in notes:
        print(note)
    print(f"submitted {job} to {api.url}; run folder {package.run_folder}", flush=True)
    if no_wait:
        print("\n".join(f"  corral {verb}" for verb in (f"logs {job} -f", f"status {job}", f"stop {job}")))
        return
    watch(api, job)


def jobs(address: DashboardAddress = None, as_json: AsJson = False) -> None:
    """List the jobs of the cluster, the newest first."""
    from corral.cluster.jobs.job import format_jobs, list_jobs, open_jobs, with_true_folder

    api = open_jobs(address)
    found = [with_true_folder(api, job) for job in list_jobs(api)]
    if as_json:
        print(json.dumps([job.as_dict() for job in found], indent=2))
    else:
        print(format_jobs(found) if found else "no jobs yet; `corral submit RECIPE` makes one")


def logs(
    job: JobName,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the output until the job ends.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Number of last lines to print.")] = None,
    address: DashboardAddress = None,
) -> None:
    """Print the output of a job."""
    from corral.cluster.jobs.job import find_job, logs_of, open_jobs
    from corral.cluster.jobs.job import follow as follow_job

    api = open_jobs(address)
    found = find_job(api, job)
    output = logs_of(api, found.id)
    lines = output.splitlines(keepends=True)
    write("".join(lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]))
    if follow and found.is_open:
        try:
            follow_job(api, found.id, write, skip=len(output))
        except KeyboardInterrupt:
            leave(found.id)


def stop(
    job: JobName,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the job to save and end.")] = 300.0,
    address: DashboardAddress = None,
) -> None:
    """Stop a job. Its run saves a checkpoint first."""
    from corral.cluster.jobs.job import open_jobs
    from corral.cluster.jobs.job import stop as stop_job

    print(stop_job(open_jobs(address), job, write, timeout))


def watch(api: "JobApi", job: str) -> None:
    """Follows a job to its end. Raises if it fails."""
    from corral.cluster.jobs.job import follow

    try:
        ended = follow(api, job, write)
    except KeyboardInterrupt:
        leave(job)
    if ended.state != "succeeded":
        if not ended.exit_code and ended.state == "failed":
            print(ended.message, file=sys.stderr)  # it has no output of its own
        raise RunError(ended.outcome)
    print(ended.outcome)


def leave(job: str) -> NoReturn:
    print(f"\njob {job} goes on: `corral logs {job} -f` follows it again, `corral stop {job}` stops it")
    raise typer.Exit(1)


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
