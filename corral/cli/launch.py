"""`corral launch`: writes or prints what a launcher needs to run a recipe, and with --go starts it."""

import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corral.cli.planning import Overrides, RecipeFile, examples
from corral.recipe.errors import RunError, UserError

if TYPE_CHECKING:
    from corral.cluster.launchers.containers import ContainerCluster
    from corral.cluster.launchers.launch_spec import LaunchFiles, LaunchSpec

app = typer.Typer(
    no_args_is_help=True,
    help="Write what a launcher needs to run a recipe, and start it.",
    epilog=examples("corral launch slurm recipe.yaml cluster.nodes=2 cluster.devices_per_node=8"),
)
LONGEST_CONTAINER_NAME = 60
OutputFolder = Annotated[Path, typer.Option(help="Folder for the files that are written.")]
Go = Annotated[bool, typer.Option("--go", help="Run the commands as well.")]
AcceleratorName = Annotated[str, typer.Option("--accelerator", help="nvidia, amd, or none for worker slots on CPUs.")]
Image = Annotated[str, typer.Option(help="Image with Corral in it, where the nodes can pull it from.")]
VariableNames = Annotated[list[str] | None, typer.Option(help="Name of a variable for the containers: WANDB_API_KEY.")]
HeadName = Annotated[str | None, typer.Option(help="The first node's name or address, as the others know it.")]
Keep = Annotated[bool, typer.Option("--keep", help="Leave the cluster up at the end.")]
CodeFolder = Annotated[Path | None, typer.Option(help="The folder whose Python files are sent, if not this one.")]
Include = Annotated[list[str] | None, typer.Option(help="Other texts of it to send, such as 'prompts/*.json'.")]
NoCode = Annotated[bool, typer.Option("--no-code", help="Send no code: the image has it.")]
HeadPort = Annotated[int, typer.Option(min=1, max=65535, help="Port of the head.")]


def make_spec(recipe: Path, overrides: Sequence[str] | None, accelerator: str = "nvidia") -> "LaunchSpec":
    """The recipe as it would be trained, checked as `corral plan` checks it."""
    from corral.cli.planning import planned
    from corral.cluster.launchers.launch_spec import Accelerator, LaunchSpec

    if accelerator not in Accelerator.__args__:  # type: ignore[attr-defined]
        known = ", ".join(Accelerator.__args__)  # type: ignore[attr-defined]
        raise UserError(f"--accelerator {accelerator} is not one of {known}")
    loaded, _ = planned(recipe, overrides)
    return LaunchSpec(loaded, recipe, tuple(overrides or ()), accelerator)  # type: ignore[arg-type]


def with_own_code(
    spec: "LaunchSpec", code: Path | None, include: Sequence[str] | None, no_code: bool, max_bytes: int
) -> "LaunchSpec":
    from corral.cluster.launchers.launch_spec import with_code

    if no_code and (code or include):
        raise UserError("--code and --include have no effect with --no-code, which sends nothing")
    if code is not None and not code.is_dir():
        raise UserError(f"{code} is not a folder")
    root = None if no_code else (code or Path.cwd()).resolve()
    return with_code(spec, Path.cwd(), root, include or (), max_bytes)


def read_mapping(option: str, text: str) -> dict[str, Any]:
    """A part of a manifest, in YAML 1.1 as Kubernetes reads it and not in the recipe's 1.2: its `0644` is octal."""
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{option} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise UserError(f"{option} must be a mapping")
    return found


def write_files(launch: "LaunchFiles", out: Path, go: bool) -> None:
    """Writes the files, prints the commands, and with `go` runs them."""
    for name, text in launch.files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if text.startswith("#!"):
            path.chmod(0o755)
        print(f"wrote {path}")
    for note in launch.notes:
        print(note)
    if launch.commands and not go:
        print("start it with --go, or with:" if launch.files else "run it with --go, or yourself:")
    for command in launch.commands:
        print(f"  {shlex.join(command)}", flush=True)
        if go and (code := subprocess.run(list(command), cwd=out).returncode):
            raise RunError(f"{command[0]} failed with exit code {code}")


def absolute(path: Path) -> Path:
    """The path as the user wrote it, links and all, but for `..` and `~`."""
    return Path(os.path.abspath(path.expanduser()))


def end_cleanly() -> None:
    """Lets signals end this process like Ctrl-C does: what it has started is stopped first."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


@app.command(
    epilog=examples(
        "corral launch slurm recipe.yaml cluster.nodes=2 --partition gpu --time 2-00:00:00 --go",
        "corral launch slurm recipe.yaml cluster.nodes=2 --container docker --image me/corral",
    )
)
def slurm(
    recipe: RecipeFile,
    overrides: Overrides = None,
    out: OutputFolder = Path("launch"),
    go: Go = False,
    accelerator: AcceleratorName = "nvidia",
    partition: Annotated[str | None, typer.Option(help="Partition, as for sbatch.")] = None,
    account: Annotated[str | None, typer.Option(help="Account, as for sbatch.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, as for sbatch: 2-00:00:00")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(min=1, help="CPUs of each node.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each node: 200G")] = None,
    gpus_per_node: Annotated[str | None, typer.Option(help="GPUs of a node: 8, h100:8; default: the recipe's.")] = None,
    nodelist: Annotated[str | None, typer.Option(help="Nodes, as for sbatch: gpu-[0,1]")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Shared folder for logs; default: beside the script.")] = None,
    setup: Annotated[list[str] | None, typer.Option(help="Line of shell to begin with: 'module load cuda'.")] = None,
    check_timeout: Annotated[int, typer.Option(min=1, help="Seconds for the nodes to come up.")] = 600,
    grace: Annotated[int, typer.Option(min=1, help="Seconds before the time limit, to save a checkpoint.")] = 120,
    port: Annotated[int | None, typer.Option(help="Port of Ray's head; default: made of the job's number.")] = None,
    container: Annotated[str | None, typer.Option(help="Containers: docker, podman, pyxis or apptainer.")] = None,
    image: Annotated[
        str | None, typer.Option(help="Image with Corral in it; a .sqsh file for pyxis, a .sif file for apptainer.")
    ] = None,
    shm: Annotated[str | None, typer.Option(help="Size of docker's and podman's /dev/shm. Default: 10g.")] = None,
    mount: Annotated[list[str] | None, typer.Option(help="Folder for containers: /here[:/there[:ro]].")] = None,
    env: VariableNames = None,
) -> None:
    """Write a batch script that starts a cluster on the job's nodes, trains, and ends it."""
    from corral.cluster.launchers.slurm import SlurmOptions, slurm_launch

    if container not in (None, "docker", "podman", "pyxis", "apptainer"):
        raise UserError(f"--container {container} is not docker, podman, pyxis or apptainer")
    if (container is None) != (image is None):
        raise UserError("--container and --image go together")
    if container not in ("docker", "podman") and shm is not None:
        raise UserError("--shm is for docker and podman; others have the node's own /dev/shm")
    if container == "apptainer" and env:
        raise UserError("--env is not needed: containers of apptainer have the whole environment of the job")
    if container is None and (mount or env):
        raise UserError(
            "--mount and --env are for containers; without --container the job has your files and variables"
        )
    sbatch = {
        "partition": partition,
        "account": account,
        "time": time,
        "cpus-per-task": cpus_per_task,
        "mem": mem,
        "gpus-per-node": gpus_per_node,
        "nodelist": nodelist,
    }
    spec = make_spec(recipe, overrides, accelerator)
    options = SlurmOptions(
        work_folder=Path.cwd(),
        log_folder=absolute(log_dir or out / "logs"),
        sbatch={name: str(value) for name, value in sbatch.items() if value is not None},
        setup=tuple(setup or ()),
        check_timeout_s=check_timeout,
        grace_s=grace,
        port=port,
        engine=container,  # type: ignore[arg-type]
        image=image or "",
        shm=shm or "10g",
        mounts=tuple(mount or ()),
        environment=tuple(env or ()),
    )
    launch = slurm_launch(spec, options, absolute(out))
    options.log_folder.mkdir(parents=True, exist_ok=True)
    write_files(launch, out, go)


CONTAINER_HELP = "Print how to start each node as a {} container, check them, and train."


@app.command(
    "podman",
    help=CONTAINER_HELP.format("podman"),
    epilog=examples("corral launch podman recipe.yaml cluster.nodes=2 --accelerator none --local --go"),
)
@app.command(
    "docker",
    help=CONTAINER_HELP.format("docker"),
    epilog=examples("corral launch docker recipe.yaml cluster.nodes=2 --head node1"),
)
def containers(
    context: typer.Context,
    recipe: RecipeFile,
    overrides: Overrides = None,
    go: Go = False,
    image: Annotated[str, typer.Option(help="Image with Corral in it; docker/Dockerfile makes one.")] = "corral",
    head: HeadName = None,
    name: Annotated[str | None, typer.Option(help="Name of the containers; default: the run's.")] = None,
    accelerator: AcceleratorName = "nvidia",
    shm: Annotated[str, typer.Option(help="Size of the containers' /dev/shm.")] = "10g",
    mount: Annotated[list[str] | None, typer.Option(help="Other folder to mount: /here[:/there[:ro]].")] = None,
    env: VariableNames = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the cluster's token, the same on each node; default: ~/.corral/token. With `--env "
            "RAY_AUTH_TOKEN` it is in the environment instead."
        ),
    ] = None,
    port: HeadPort = 6379,
    infiniband: Annotated[bool, typer.Option("--infiniband", help="Pass /dev/infiniband to containers.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Run all nodes as containers of this machine.")] = False,
    keep: Keep = False,
) -> None:
    from corral.cluster.launchers.containers import ContainerCluster
    from corral.runtime.token import default_token, make_token

    spec = make_spec(recipe, overrides, accelerator)
    if local and spec.accelerator != "none" and spec.num_nodes > 1:
        raise UserError("--local: several containers would share this machine's GPUs; use --accelerator none")
    if head is None and spec.num_nodes > 1 and not local:
        raise UserError("where is the head? --head HOST: the first node, as the others know it (or --local)")
    if go and spec.num_nodes > 1 and not local:
        raise UserError(
            f"these lines belong on {spec.num_nodes} machines, and --go starts containers on this one: run each "
            "line where it belongs, or start all nodes here with --local"
        )
    token = None if "RAY_AUTH_TOKEN" in (env or ()) else absolute(token_file or default_token())
    if go and token == default_token() and not token.is_file():
        make_token()
    called = name or spec.short_name(LONGEST_CONTAINER_NAME)
    cluster = ContainerCluster(
        engine="podman" if context.info_name == "podman" else "docker",
        spec=spec,
        image=image,
        name=called,
        head=f"{called}-0" if local else head,
        folder=Path.cwd(),
        token_file=token,
        shm=shm,
        mounts=tuple(mount or ()),
        environment=tuple(env or ()),
        port=port,
        infiniband=infiniband,
        is_local=local,
    )
    if go:
        run_containers(cluster, keep)
    else:
        print_containers(cluster)


def print_containers(cluster: "ContainerCluster") -> None:
    """Prints the commands as a shell would read them; a comment says where each must run."""
    if cluster.token_file is not None:
        file, folder = (shlex.quote(str(path)) for path in (cluster.token_file, cluster.token_file.parent))
        print("# the token is the same on all nodes: make it on one, and copy it to the others")
        print(f"# (umask 077 && mkdir -p {folder} && openssl rand -hex 32 > {file})")
    if cluster.engine == "podman" and cluster.spec.accelerator != "none":
        print("# as root; for another user, leave out each --ulimit that is above the user's own")
    last = ""
    steps = cluster.bring_up()
    commands = [(step.where, step.command) for step in [*steps, cluster.train()]]
    commands += [(step.where, step.undo) for step in reversed(steps) if step.undo is not None]
    for where, command in commands:
        if where != last:
            print(f"# {where}")
            last = where
        print(shlex.join(command))


def run_containers(cluster: "ContainerCluster", is_kept: bool) -> None:
    """Runs one step after the other. What was started is removed at the end, unless it is to be kept."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    undo: list[Sequence[str]] = []
    end_cleanly()
    try:
        for step in [*cluster.bring_up(), cluster.train(is_terminal)]:
            if step.made is not None and subprocess.run(step.made, capture_output=True).returncode == 0:
                raise UserError(
                    f"{step.made[-1]} is there already, perhaps with a run in it; remove it with "
                    f"`{shlex.join(step.undo or ())}`, or choose another --name"
                )
            print(shlex.join(step.command), flush=True)
            undo += [step.undo] if step.undo is not None else []
            if code := subprocess.run(step.command).returncode:
                for rank in range(cluster.spec.num_nodes):
                    subprocess.run(cluster.logs(rank))
                raise RunError(f"{shlex.join(step.command[:3])} ... failed with exit code {code}")
    finally:
        if is_kept:
            print("the containers are kept; remove them with:")
        for command in reversed(undo):
            print(shlex.join(command), flush=True)
            if not is_kept:
                subprocess.run(command, stdout=subprocess.DEVNULL)


@app.command(
    epilog=examples(
        "corral launch dstack recipe.yaml logging.runs=/runs --image me/corral --gpu 80GB --volume results:/runs"
    )
)
def dstack(
    recipe: RecipeFile,
    image: Image,
    overrides: Overrides = None,
    out: OutputFolder = Path("launch"),
    go: Go = False,
    accelerator: AcceleratorName = "nvidia",
    gpu: Annotated[str | None, typer.Option(help="Kind of GPU, as for dstack: H100, 80GB, A100:80GB.")] = None,
    shm: Annotated[str, typer.Option(help="Size of the containers' /dev/shm.")] = "16GB",
    env: VariableNames = None,
    volume: Annotated[list[str] | None, typer.Option(help="/on/the/instance:/path, or name-of-a-volume:/path.")] = None,
    fleet: Annotated[list[str] | None, typer.Option(help="Fleet to run on.")] = None,
    code: CodeFolder = None,
    include: Include = None,
    no_code: NoCode = False,
) -> None:
    """Write a dstack task that starts a cluster on its nodes and trains on the first. The run folder is on a volume."""
    from corral.cluster.launchers.dstack import MAX_CODE_BYTES, TOKEN, dstack_launch
    from corral.runtime.token import find_token, make_token

    launch = dstack_launch(
        with_own_code(make_spec(recipe, overrides, accelerator), code, include, no_code, MAX_CODE_BYTES),
        folder=absolute(out),
        image=image,
        gpu=gpu,
        shm=shm,
        environment=env or (),
        volumes=volume or (),
        fleets=fleet or (),
    )
    if go and TOKEN not in os.environ:
        os.environ[TOKEN] = find_token(None, None, os.environ) or make_token()
    write_files(launch, out, go)


@app.command(
    epilog=examples("corral launch kuberay recipe.yaml logging.runs=/runs --image me/corral --claim results:/runs")
)
def kuberay(
    recipe: RecipeFile,
    image: Image,
    overrides: Overrides = None,
    out: OutputFolder = Path("launch"),
    go: Go = False,
    accelerator: AcceleratorName = "nvidia",
    kind: Annotated[str, typer.Option(help="job: trains and ends. cluster: stays, for you to train on.")] = "job",
    namespace: Annotated[str | None, typer.Option(help="Namespace of Kubernetes.")] = None,
    shm: Annotated[str, typer.Option(help="Size of the pods' /dev/shm.")] = "16Gi",
    cpus: Annotated[str | None, typer.Option(help="CPUs of each pod.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of each pod: 200Gi.")] = None,
    claim: Annotated[list[str] | None, typer.Option(help="Persistent volume claim and path: models:/models")] = None,
    secret: Annotated[list[str] | None, typer.Option(help="A Secret whose keys become environment variables.")] = None,
    token_secret: Annotated[str | None, typer.Option(help="Secret with auth_token; default: KubeRay's own.")] = None,
    ray_version: Annotated[str | None, typer.Option(help="Version of Ray in the image; default: this one.")] = None,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds for a job's pods to start.")] = 1800,
    code: CodeFolder = None,
    include: Include = None,
    no_code: NoCode = False,
    toleration: Annotated[list[str] | None, typer.Option(help="KEY[=VALUE][:EFFECT] of a taint. Repeatable.")] = None,
    node_selector: Annotated[list[str] | None, typer.Option(help="KEY=VALUE that nodes must have.")] = None,
    service_account: Annotated[str | None, typer.Option(help="Service account of the pods.")] = None,
    pull_secret: Annotated[list[str] | None, typer.Option(help="Secret with which the image is pulled.")] = None,
    security_context: Annotated[
        str | None, typer.Option(help="The pods' security context: '{runAsUser: 1000, fsGroup: 1000}'")
    ] = None,
    rdma: Annotated[str | None, typer.Option(help="RDMA resource of each pod: rdma/hca_shared_devices_a=1")] = None,
    pod_patch: Annotated[
        Path | None, typer.Option(help="YAML file, merged into each pod's template; its container is `ray`.")
    ] = None,
) -> None:
    """Write a RayJob or RayCluster for KubeRay; recipe and code are a ConfigMap. The run folder is on a claim."""
    from corral.cluster.launchers.kuberay import MAX_CODE_BYTES, PodOptions, kuberay_launch
    from corral.cluster.node_report import installed_version

    if kind not in ("job", "cluster"):
        raise UserError(f"--kind {kind} is not job or cluster")
    ray_version = ray_version or installed_version("ray")
    if ray_version == "none":
        raise UserError("Ray is not installed here: say with --ray-version which one the image has")
    pod = PodOptions(
        tolerations=toleration or (),
        node_selectors=node_selector or (),
        service_account=service_account,
        pull_secrets=pull_secret or (),
        security_context={} if security_context is None else read_mapping("--security-context", security_context),
        rdma=rdma,
        patch={} if pod_patch is None else read_mapping(f"--pod-patch {pod_patch}", pod_patch.read_text()),
    )
    launch = kuberay_launch(
        with_own_code(make_spec(recipe, overrides, accelerator), code, include, no_code, MAX_CODE_BYTES),
        folder=absolute(out),
        image=image,
        kind=kind,  # type: ignore[arg-type]
        ray_version=ray_version,
        namespace=namespace,
        shm=shm,
        cpus=cpus,
        memory=memory,
        claims=claim or (),
        secrets=secret or (),
        token_secret=token_secret,
        start_timeout_s=timeout,
        pod=pod,
    )
    write_files(launch, out, go)


@app.command(epilog=examples("corral launch pods recipe.yaml cluster.nodes=2 cluster.devices_per_node=8 --go"))
def pods(
    recipe: RecipeFile,
    overrides: Overrides = None,
    go: Annotated[bool, typer.Option("--go", help="Run the script here, in a pod of the job.")] = False,
    accelerator: AcceleratorName = "nvidia",
) -> None:
    """Print the script for all pods of a job of PAI-DLC or Kubeflow; with --go run it, as the job's command."""
    from corral.cluster.launchers.pods import check_common_token, pods_script

    spec = make_spec(recipe, overrides, accelerator)
    script = pods_script(spec, spec.train_command)
    if not go:
        print(script, end="")
        return
    if spec.num_nodes > 1:
        check_common_token()
    os.execvp("sh", ["sh", "-c", script])


@app.command("host-setup", epilog=examples("corral launch host-setup --family apt > setup.sh"))
def host_setup(
    family: Annotated[str | None, typer.Option(help="Package manager, apt or yum; default: this machine's.")] = None,
    amd: Annotated[bool, typer.Option("--amd", help="Prepare for AMD's GPUs instead of NVIDIA's.")] = False,
    docker_source: Annotated[
        str | None, typer.Option(help="Address of a mirror of https://download.docker.com/linux.")
    ] = None,
    toolkit_source: Annotated[
        str | None, typer.Option(help="Address of a mirror of https://nvidia.github.io/libnvidia-container.")
    ] = None,
) -> None:
    """Print a script that installs docker and what containers need for GPUs."""
    from shutil import which

    from corral.cluster.launchers.containers import host_setup as make_script

    found = family or ("yum" if which("dnf") or which("yum") else "apt")
    if found not in ("apt", "yum"):
        raise UserError(f"--family {found} is not apt or yum")
    sources = {"docker": docker_source, "nvidia": toolkit_source}
    print(make_script(found, amd, sources), end="")  # type: ignore[arg-type]


@app.command(epilog=examples("corral launch ssh recipe.yaml cluster.nodes=2 --hosts hosts.txt --go"))
def ssh(
    recipe: RecipeFile,
    hosts: Annotated[Path, typer.Option(help="A file: [user@]host[:port] [devices=N] per line; the head first.")],
    overrides: Overrides = None,
    go: Go = False,
    accelerator: AcceleratorName = "nvidia",
    head: HeadName = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="Folder on the hosts; default: this one.")] = None,
    port: HeadPort = 6379,
    program: Annotated[str, typer.Option("--corral", help="Name of the program `corral` on the hosts.")] = "corral",
    ssh_config: Annotated[Path | None, typer.Option(help="Configuration for ssh, instead of yours.")] = None,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds for the hosts to come up.")] = 600,
    keep: Keep = False,
) -> None:
    """Start a cluster over ssh, train on its head, and take it down."""
    from corral.cluster.launchers.ssh import SshCluster, read_hosts, run_over_ssh

    spec = make_spec(recipe, overrides, accelerator)
    named = read_hosts(hosts)
    if len(named) < spec.num_nodes:
        raise UserError(f"the recipe is for {spec.num_nodes} nodes (`cluster.nodes`), and {hosts} has {len(named)}")
    cluster = SshCluster(
        spec=spec,
        hosts=named[: spec.num_nodes],
        id=f"{spec.name}-{secrets.token_hex(4)}",
        head=head or named[0].name,
        folder=directory or Path.cwd(),
        port=port,
        program=program,
        config=None if ssh_config is None else absolute(ssh_config),
        start_timeout_s=timeout,
    )
    if go:
        end_cleanly()
        run_over_ssh(cluster, lambda line: print(line, flush=True), is_kept=keep)
        return
    print("# the cluster's token, which travels in ssh's standard input: openssl rand -hex 32 > token")
    for remote in cluster.prepare():
        print(f"{shlex.join(remote.command(cluster.config))} < token")
    steps = [*map(cluster.up, range(spec.num_nodes)), cluster.check(), cluster.train()]
    for remote in [*steps, *(cluster.stop(host) for host in cluster.hosts)]:
        print(shlex.join(remote.command(cluster.config)))
