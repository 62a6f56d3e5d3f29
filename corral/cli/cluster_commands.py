"""The verbs of a cluster: up, down, check, status, stacks, doctor, chaos; and of its jobs: submit, jobs, logs, stop."""

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from corral.cli.planning import AsJson, Overrides, RecipeFile, ResumeAnyway, planned
from corral.recipe.errors import RunError, UserError

if TYPE_CHECKING:
    from corral.cluster.jobs.job import JobApi
    from corral.runtime.membership import Membership

HeadAddress = Annotated[str | None, typer.Option(help="HOST:PORT of the head; default: the cluster of this node.")]
HeadFilePath = Annotated[
    Path | None,
    typer.Option("--head-file", help="File with the head's address, on a file system that all nodes share."),
]
DashboardAddress = Annotated[
    str | None,
    typer.Option("--address", help="URL of the cluster's dashboard, http://HEAD:8265, if not this node's own."),
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, or the beginning of it.")]


def up(
    head: Annotated[bool, typer.Option("--head", help="Start a cluster here; the same as RANK=0.")] = False,
    join: Annotated[str | None, typer.Option(help="Join the cluster at HOST[:PORT].")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Rank of this node; default: $RANK.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes; default: $WORLD_SIZE.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the head; default: $MASTER_PORT, else 6379.")] = None,
    devices: Annotated[int | None, typer.Option(min=0, help="Devices of this node; default: its GPUs, or one.")] = None,
    head_file: HeadFilePath = None,
    id: Annotated[
        str | None,
        typer.Option(help="Id of this start, the same on all nodes; head files of other starts are ignored."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the head, and for all nodes.")] = 600.0,
    wait: Annotated[bool, typer.Option(help="Wait for all nodes to join.")] = True,
    block: Annotated[bool, typer.Option("--block", help="Stay in the foreground until a signal comes.")] = False,
    address: Annotated[str | None, typer.Option(help="Address of this node; default: that towards the head.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token; default: ~/.corral/token.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use no token: whoever reaches this node can run commands on it.")
    ] = False,
    dashboard_host: Annotated[str, typer.Option(help="Address on which the head serves its dashboard.")] = "127.0.0.1",
    dashboard_port: Annotated[int, typer.Option(help="Port of the dashboard; the next free one is taken.")] = 8265,
    debugger: Annotated[str | None, typer.Option(help="legacy: allow `ray debug`.")] = None,
    beside: Annotated[bool, typer.Option("--beside", help="Another Ray may run on this node.")] = False,
    temp_dir: Annotated[Path | None, typer.Option(help="Folder of your own, mode 0700, for what Ray writes.")] = None,
    gcs_storage: Annotated[
        bool,
        typer.Option("--gcs-storage", help="The head's GCS keeps its tables on disk, and is started again if it dies."),
    ] = False,
    ray_options: Annotated[
        list[str] | None, typer.Argument(help="Options for `ray start`, after --.", metavar="[-- RAY OPTIONS]")
    ] = None,
) -> None:
    """Make this node part of a cluster: the same command on every node. RANK=0 is the head."""
    from corral.cluster.identity import check_port, find_identity
    from corral.cluster.up import EndedBySignal, UpOptions, end_on_signals, stay, stop_ray, wait_for_all
    from corral.cluster.up import up as bring_up
    from corral.observe.status_line import Countdown, StatusLine

    if debugger not in (None, "legacy"):
        raise UserError(f"--debugger {debugger}: there is only `legacy`; Ray's other debugger needs nothing here")
    if debugger is not None:
        from corral.runtime.remote_debugger import has_legacy_debugger

        if not has_legacy_debugger():
            raise UserError(f"--debugger {debugger}: the installed Ray has no `ray debug` any more")
    if port is not None:
        check_port(port, "--port")
    options = UpOptions(
        identity=find_identity(
            os.environ,
            head=head,
            join=join,
            rank=rank,
            nodes=nodes,
            port=port,
            id=id,
            has_head_file=head_file is not None,
        ),
        devices=devices,
        head_file=head_file,
        timeout_s=timeout,
        address=address,
        token_file=token_file,
        is_insecure=insecure,
        dashboard=(dashboard_host, check_port(dashboard_port, "--dashboard-port")),
        debugger=debugger,
        is_beside=beside,
        temp_dir=temp_dir,
        gcs_storage=gcs_storage,
        ray_options=tuple(ray_options or ()),
    )
    line, member = StatusLine(), None
    if block:
        end_on_signals()
    try:
        member = bring_up(options, line)
        print_membership(member)
        if wait and member.num_nodes is not None:
            wait_for_all(member, member.num_nodes, Countdown(timeout, line))
            print(f"all {member.num_nodes} nodes are there", flush=True)
        if member.is_head:
            print(f"dashboard {member.dashboard}", flush=True)
        if block:
            stay(member)
    except EndedBySignal:
        pass
    finally:
        line.clear()
        if block and member is not None:
            stop_ray(member)


def print_membership(member: "Membership") -> None:
    rank = "joined" if member.rank is None else f"rank {member.rank}{' (head)' if member.is_head else ''}"
    print(f"{rank}: {member.node_address}, {member.devices} devices, cluster {member.address}", flush=True)
    if member.token_file is None:
        print("no token: whoever reaches this node can run commands on it (--insecure)", flush=True)
    if member.is_head and member.num_nodes != 1 and not member.address.startswith("127."):
        how = f"--head-file {member.head_file}" if member.head_file else f"--join {member.address}"
        token = "" if member.head_file else ", where ~/.corral/token is that of this node"
        print(f"others join with: corral up {how} and their own RANK{token}", flush=True)


def down(
    port: Annotated[int | None, typer.Option(help="Port of one cluster; default: all.")] = None,
    force: Annotated[bool, typer.Option("--force", help="End it even if training runs.")] = False,
) -> None:
    """End what `corral up` started on this node, and nothing else."""
    from corral.cluster.up import down as bring_down

    ended = bring_down(port, force)
    for member, count in ended:
        print(f"ended {count} processes of the cluster {member.address}")
    if not ended:
        print("nothing was up on this node")


def check(
    devices: Annotated[int, typer.Argument(min=0, help="Least number of devices.")],
    nodes: Annotated[int, typer.Option(min=0, help="Least number of nodes.")] = 0,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for them.")] = 300.0,
    address: HeadAddress = None,
    head_file: HeadFilePath = None,
    as_json: AsJson = False,
) -> None:
    """Wait until the cluster has so many devices, and list them. Exits with 1 and what is missing."""
    from corral.cluster.gcs import wait_for_cluster, wait_for_devices
    from corral.observe.status_line import Countdown, StatusLine

    countdown = Countdown(timeout, StatusLine())
    found, lack = wait_for_devices(wait_for_cluster(address, head_file, countdown), devices, nodes, countdown)
    print(json.dumps(found.as_dict(), indent=2) if as_json else found.text())
    if lack:
        raise RunError(lack)
    if found.mixtures:
        raise typer.Exit(1)


def status(
    target: Annotated[
        str | None,
        typer.Argument(metavar="[RUN|JOB]", help="Follow the run in this folder, or describe this job instead."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Of a run: print its state now, and do not follow it.")] = False,
    address: HeadAddress = None,
    as_json: AsJson = False,
) -> None:
    """List the nodes of the cluster and the jobs that run on it; or follow one run, or describe one job."""
    if target is not None and is_run_folder(target):
        show_run(Path(target), once, as_json)
        return
    check_linux("status")
    from corral.cluster.gcs import ClusterStatus, Gcs, find_head
    from corral.cluster.jobs.job import describe_job, format_jobs, list_jobs, open_jobs

    if target is not None:
        found, text = describe_job(open_jobs(address), target)
        print(json.dumps(found.as_dict(), indent=2) if as_json else text)
        return
    cluster = ClusterStatus.query(Gcs(find_head(address)))
    try:
        jobs = [one for one in list_jobs(open_jobs(address)) if one.is_open]
    except UserError:  # the dashboard may listen on the head's loopback only
        jobs = []
    if as_json:
        print(json.dumps({**cluster.as_dict(), "jobs": [one.as_dict() for one in jobs]}, indent=2))
    else:
        print("\n".join([cluster.text(), *([format_jobs(jobs)] if jobs else [])]))


def is_run_folder(target: str) -> bool:
    """Whether it is no job. A path is none, and a folder beside a job of the same name is it if it is a run's."""
    from corral.view.runs import is_run

    return "/" in target or is_run(Path(target))


def show_run(folder: Path, once: bool, as_json: bool) -> None:
    from corral.view.terminal_view import open_runs, run_status, watch

    [run] = open_runs([folder])
    if as_json:
        print(json.dumps(run_status(run), indent=2))
    else:
        watch(run, once)


def stacks(
    address: Annotated[str | None, typer.Option(help="HOST:PORT of the head; default: this node's cluster.")] = None,
    as_json: AsJson = False,
    native: Annotated[bool, typer.Option("--native", help="Print frames of compiled libraries, too. Slower.")] = False,
) -> None:
    """Print what every process of Corral is doing right now: on all nodes of the cluster, or else on this machine."""
    from corral.cluster.stacks import format_stacks, stacks_here, stacks_of_cluster
    from corral.runtime.connection import find_cluster

    problems: list[str] = []
    if find_cluster(address) is None:
        processes = stacks_here(native)
    else:
        from corral.cluster.gcs import attached

        with attached(address):
            processes, problems = stacks_of_cluster(native)
    if as_json:
        print(json.dumps({"processes": [one.as_dict() for one in processes], "problems": problems}, indent=2))
    else:
        print(format_stacks(processes) or "no process of Corral is running")
        for problem in problems:
            print(f"warning: {problem}", file=sys.stderr)
    if problems:
        raise typer.Exit(1)


def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="Also check what this recipe needs.")] = None,
    overrides: Overrides = None,
    everywhere: Annotated[bool, typer.Option("--all", help="Check all nodes; an error without a cluster.")] = False,
    here: Annotated[bool, typer.Option("--here", help="Check this node only, also where a cluster is up.")] = False,
    address: Annotated[str | None, typer.Option(help="HOST:PORT of the cluster's head.")] = None,
    shared: Annotated[list[str] | None, typer.Option(help="A folder that all nodes are to share. Repeatable.")] = None,
    as_json: AsJson = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for any one answer of a node.")] = 120.0,
) -> None:
    """Look for what is wrong with this node, or with all nodes of the cluster: devices, memory, disks, network,
    versions, shared folders; with a recipe, what that needs: the code that it names is imported, its reward function is
    called. Exits with 1 if there is an error."""
    from corral.cluster.doctor.diagnose import DoctorOptions, diagnose

    if here and (everywhere or address):
        raise UserError("--here is this node only: leave out --all and --address")
    options = DoctorOptions(recipe, overrides or (), shared or (), timeout, show_progress)
    diagnosis = diagnose(options, address, everywhere, here)
    show_progress("")
    print(json.dumps(diagnosis.as_dict(), indent=2) if as_json else diagnosis.text())
    if diagnosis.num_errors:
        raise typer.Exit(1)


def show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="\r", file=sys.stderr, flush=True)


def chaos(
    recipe: RecipeFile,
    overrides: Overrides = None,
    faults: Annotated[int, typer.Option(min=1, help="Number of faults.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of their kinds, moments and victims.")] = 0,
    kinds: Annotated[
        str | None, typer.Option(help="Such as kill-worker,full-disk; default: all but cut-off-node.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0, help="Mean seconds from a recovery to the next fault.")] = 5.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds in which the run has to recover.")] = 600.0,
    max_silence: Annotated[float, typer.Option(min=1, help="Seconds for which the console may be silent.")] = 60.0,
    report: Annotated[Path | None, typer.Option(help="JSON file; default: chaos.json in the run's folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train the recipe in a run folder of its own while faults hit it at random moments: processes are killed or
    stopped, the disk is full. Then audit that no prompt was lost or trained twice, that every end was explained and
    that nothing was left behind. Exits with 1 if anything was."""
    from corral.cluster.chaos import chaos as run_chaos
    from corral.cluster.chaos_report import ChaosOptions
    from corral.cluster.faults import BY_DEFAULT, KINDS

    chosen = BY_DEFAULT if kinds is None else tuple(kinds.split(","))
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        listed = "".join(f"\n  {name}: {kind.description}" for name, kind in KINDS.items())
        raise UserError(f"--kinds: there is no {', '.join(unknown)}, but{listed}")
    planned(recipe, overrides)  # raises what is wrong with it
    options = ChaosOptions(faults, seed, chosen, interval, timeout, max_silence)
    found = run_chaos(recipe, overrides or [], options, lambda text: print(text, file=sys.stderr, flush=True), report)
    print(json.dumps(found.as_dict(), indent=2) if as_json else found.text())
    if found.problems:
        raise typer.Exit(1)


# --- jobs: runs that the cluster does by itself


def submit(
    recipe: RecipeFile,
    overrides: Overrides = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not follow the job's output.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Only go on with a run that has a checkpoint.")] = False,
    resume_anyway: ResumeAnyway = False,
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
        resume_anyway=resume_anyway,
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


def on_linux(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb, which on other systems ends with one line instead of what it would meet there."""

    @wraps(verb)
    def checked(*arguments: Any, **options: Any) -> None:
        check_linux(verb.__name__)
        verb(*arguments, **options)

    return checked if verb is not status else verb  # a run's folder can be anywhere


def check_linux(name: str) -> None:
    if sys.platform != "linux":
        raise UserError(f"`corral {name}` needs Linux, and this is {sys.platform}: run it on a cluster's node")


VERBS: dict[Callable[..., None], str] = {
    up: "RANK=0 WORLD_SIZE=2 MASTER_ADDR=node1 corral up",
    down: "corral down",
    check: "corral check 16 --nodes 2",
    status: "corral status runs/my-run",
    stacks: "corral stacks --native",
    doctor: "corral doctor recipe.yaml --all --shared /data",
    chaos: "corral chaos recipe.yaml --faults 200 --seed 1 --kinds kill-worker,kill-controller",
    submit: "corral submit recipe.yaml schedule.steps=100 --env WANDB_API_KEY",
    jobs: "corral jobs --json",
    logs: "corral logs my-run -f",
    stop: "corral stop my-run",
}
"""Each with an example."""
