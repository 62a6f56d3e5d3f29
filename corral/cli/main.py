"""The command line: parses, calls, prints. What a verb does is elsewhere."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from corral.cli import bench, cluster_commands, envs, launch, migrate, planning, retriever
from corral.cli.chinese import add_chinese
from corral.cli.planning import AsJson, Overrides, RecipeFile, examples, planned
from corral.cli.starter import init
from corral.recipe.errors import RunError, RunInterrupted, UserError, first_line, install_command, without_controls

app = typer.Typer(
    name="corral",
    help="Reinforcement learning for language models and agents, from a laptop to a cluster, with one recipe file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples("corral init", "corral plan recipe.yaml", "corral train recipe.yaml batch.prompts_per_step=16"),
)

PANELS = {
    "Train": "init plan rehearse train sft evaluate export serve migrate",
    "Look at runs": "view compare status ledger stacks",
    "Clusters and jobs": "up down check doctor submit jobs logs stop launch",
    "Data, environments, measurements": "data env retriever bench chaos version",
}
"""The verbs, as `corral --help` groups them."""
INTERRUPTED = 130  # exit code of a process that SIGINT ended, by convention of the shell


def print_version(is_asked: bool) -> None:
    if is_asked:
        print(describe_version("corral"))
        raise typer.Exit


def describe_version(package: str) -> str:
    from corral.cluster.node_report import installed_version

    found = installed_version(package)
    return f"{package} is not installed as a package" if found == "none" else f"{package} {found}"


@app.callback()
def corral(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=print_version, help="Print Corral's version and exit.")
    ] = False,
) -> None:
    """Options that are no verb's."""


@app.command(
    cls=planning.RecipeCommand,
    epilog=examples("corral train recipe.yaml", "corral train recipe.yaml algorithm.name=ppo"),
)
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    debug: planning.Debug = False,
    post_mortem: planning.PostMortem = False,
    insecure: planning.Insecure = False,
    resume_anyway: planning.ResumeAnyway = False,
) -> None:
    """Train as the recipe says. The same command again continues a stopped run."""
    loaded = planning.load_own_recipe(recipe, overrides or [])
    from corral.runtime.local_debugger import Debugging  # with torch: a mistake in the recipe does not wait for it

    planning.train_recipe(loaded, Debugging(debug, post_mortem, insecure), resume_anyway)


@app.command(
    cls=planning.RecipeCommand, epilog=examples("corral rehearse recipe.yaml", "corral rehearse recipe.yaml --quick")
)
def rehearse(
    recipe: RecipeFile,
    overrides: Overrides = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One step in one process, on one device, in seconds; nothing is killed.")
    ] = False,
    on_cluster: Annotated[
        bool,
        typer.Option("--on-cluster", help="On the nodes of the Ray cluster that runs, instead of all on this machine."),
    ] = False,
    debug: planning.Debug = False,
    as_json: AsJson = False,
) -> None:
    """Run the recipe small on this machine before it costs anything: all its workers, roles, meshes and transfers, with
    few narrow layers of its model. A worker is killed, and the run resumed on another mesh. Exits with 1 if any of it
    failed."""
    if on_cluster and quick:
        raise UserError("--quick is one process, which needs no cluster: leave --on-cluster away")
    if debug and not quick:
        raise UserError("--debug belongs to --quick: workers of a whole rehearsal are processes of their own")
    if as_json and quick:
        raise UserError("--json belongs to a whole rehearsal; what --quick trains has its metrics in its run folder")
    loaded = planning.load_own_recipe(recipe, overrides or [])
    if not quick:
        planning.rehearse_recipe(recipe, loaded, on_cluster, as_json)
        return
    from corral.runtime.local_debugger import Debugging

    planning.rehearse_quickly(loaded, Debugging(debug))


@app.command(cls=planning.RecipeCommand, epilog=examples("corral sft recipe.yaml data.train.path=chats.jsonl"))
def sft(
    recipe: RecipeFile,
    overrides: Overrides = None,
    debug: planning.Debug = False,
    post_mortem: planning.PostMortem = False,
    insecure: planning.Insecure = False,
    resume_anyway: planning.ResumeAnyway = False,
) -> None:
    """Train on the answers of the recipe's rows: `corral train` with algorithm.name=sft."""
    train(recipe, [*(overrides or []), "algorithm.name=sft"], debug, post_mortem, insecure, resume_anyway)


@app.command(
    cls=planning.RecipeCommand,
    epilog=examples(
        "corral plan recipe.yaml cluster.nodes=4 cluster.devices_per_node=8",
        "corral plan recipe.yaml --json",
        "corral plan recipe.yaml model.path=models/Qwen2.5-7B --fit --devices 8xh100-80",
    ),
)
def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    check: planning.Check = False,
    fit: planning.FitFlag = False,
    devices: planning.FitDevices = None,
) -> None:
    """Print what would run where: batch arithmetic, placement, memory, links, warnings. Touches no device."""
    if fit != (devices is not None):
        raise UserError("--fit and --devices go together, as in `corral plan recipe.yaml --fit --devices 8xh100-80`")
    if devices is not None:
        if check:
            raise UserError("--fit does not go with --check: add the settings that it finds first")
        planning.print_fit(recipe, overrides or [], devices, as_json)
        return
    planning.print_plan(planning.load_own_recipe(recipe, overrides or []), as_json, check)


@app.command(
    cls=planning.RecipeCommand,
    epilog=examples("corral evaluate recipe.yaml --model runs/my-run/checkpoints/step_000040"),
)
def evaluate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="A checkpoint, a run's folder, or any other model, instead of the recipe's.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on the recipe's held-out questions, in the same environment."""
    loaded, _ = planned(recipe, overrides)
    from corral.loop.train import evaluate as run_evaluation  # with torch: a mistake does not wait for it
    from corral.observe.console import Console

    console = Console(sys.stderr if as_json else None)
    metrics = run_evaluation(loaded, model, console)
    if as_json:
        print(json.dumps(metrics, indent=2))


@app.command(epilog=examples("corral export runs/my-run/checkpoints/step_000040 my-model --dtype bfloat16"))
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's: its newest checkpoint.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; must not exist.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto keeps the model's.")] = "auto",
    merge: Annotated[bool, typer.Option("--merge", help="Merge LoRA adapters into their base model.")] = False,
) -> None:
    """Write a checkpoint's model and tokenizer, without optimizer state, for transformers, vLLM and others."""
    from corral.model.lora import AdapterFolder
    from corral.observe.console import quiet_libraries
    from corral.training.checkpoint import export_model, find_model

    if merge:
        import transformers.utils.logging  # noqa: F401 - whose bars are to be off before it loads a model

        quiet_libraries()
    checkpoint = Path(find_model(str(checkpoint)))
    export_model(checkpoint, out, dtype, merge)
    print(f"wrote {out}")
    adapter = AdapterFolder.find(str(checkpoint))
    if adapter is not None and adapter.quantization is not None:
        rounded = f"{adapter.quantization.bits} bits, with which the adapters were trained"
        kept = f"its weights are those of {rounded}, in the model's dtype" if merge else f"the base model has {rounded}"
        print(kept)


@app.command(epilog=examples("corral serve runs/my-run --port 8000"))
def serve(
    model: Annotated[str, typer.Argument(help="A checkpoint, a model's folder, a hub name, or a run's folder.")],
    host: Annotated[str, typer.Option(help="Address; if not loopback, needs a token or --insecure.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model in answers. Default: as it is given.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_length: Annotated[int, typer.Option(min=2, help="Most tokens of a prompt and its completion.")] = 4096,
    max_sequences: Annotated[int | None, typer.Option(min=1, help="Sequences decoded at the same time.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="A file, instead of the model's own template.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
    token_file: Annotated[Path | None, typer.Option(help="File with the bearer token that each request needs.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Other machines may ask without a token.")] = False,
) -> None:
    """Serve a model over HTTP: the OpenAI API, and tokens in, tokens out, as vLLM has it."""
    from corral.http_server import token_for
    from corral.recipe.schema import Model
    from corral.rollout.engine_server import load_served_model
    from corral.rollout.engine_server import serve as run_server
    from corral.training.checkpoint import find_model

    token = token_for(host, token_file, insecure)
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise UserError(f"--dtype {dtype} is none of auto, float32, bfloat16, float16")
    spec = Model.model_validate(
        {
            "path": find_model(model),
            "dtype": dtype,
            "chat_template": chat_template,
            "trust_remote_code": trust_remote_code,
        }
    )
    run_server(
        lambda: load_served_model(spec, max_length, max_sequences),
        name or model,
        host,
        port,
        token=token,
        report=lambda text: print(text, flush=True),
    )


@app.command(epilog=examples("corral view", "corral view runs/my-run other/runs --port 8080"))
def view(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs, or around them.  [default: runs]")
    ] = None,
    host: Annotated[str, typer.Option(help="Address; if not loopback, needs a token or --insecure.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any that is free.")] = 8080,
    export: Annotated[Path | None, typer.Option(help="Write the pages as static files to this new folder.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the bearer token that each request needs.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Other machines may look without a token.")] = False,
) -> None:
    """Show runs in a browser: curves, steps, trajectories token by token, live while they are trained. Read-only."""
    from corral.http_server import token_for
    from corral.view import static_files, view_server

    folders = folders or [Path("runs")]
    if export is not None:
        return static_files.export(folders, export)
    token = token_for(host, token_file, insecure)
    view_server.serve(folders, host, port, token=token, report=lambda text: print(text, flush=True))


@app.command(epilog=examples("corral compare runs/my-run runs/my-run-2"))
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Folders of runs.")],
    as_json: AsJson = False,
) -> None:
    """Put runs beside each other: held-out scores, reward, speed, minutes, keys in which their recipes differ."""
    from corral.view import terminal_view

    found = terminal_view.compare(terminal_view.open_runs(runs))
    if as_json:
        print(json.dumps(found, indent=2, default=str))
    else:
        terminal_view.print_comparison(found)


@app.command(epilog=examples("corral data gsm8k --out data/gsm8k"))
def data(
    name: Annotated[str, typer.Argument(help="Name of the data set: gsm8k, math, countries.")],
    out: Annotated[Path, typer.Option(help="Folder for the files.")] = Path("data"),
    local: Annotated[Path | None, typer.Option(help="A folder with a copy of the set, instead of the hub.")] = None,
) -> None:
    """Prepare a public data set: files that recipes can name."""
    from corral.data.prepare import prepare

    for path in prepare(name, out, local):
        print(f"wrote {path}")


@app.command(epilog=examples("corral ledger runs/my-run", "corral ledger runs/my-run --prompt 12"))
def ledger(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    prompt: Annotated[int | None, typer.Option(min=0, help="Print the history of this prompt instead.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print what became of the prompts of a run. Exits with 1 if any was lost or trained twice."""
    from corral.observe.ledger import Ledger

    path = run / Ledger.name
    if not path.is_file():
        raise UserError(f"{run} has no {Ledger.name}; is it the folder of a run?")
    opened = Ledger(path)
    if prompt is not None:
        history = opened.history_of(prompt)
        text = "\n".join([f"prompt {prompt}", *(f"  {line}" for line in history or ["was never issued"])])
        print(json.dumps({"prompt": prompt, "history": history}, indent=2) if as_json else text)
        return
    audit = opened.audit()
    print(json.dumps(audit.as_dict(), indent=2) if as_json else audit.text())
    if not audit.clean:
        raise typer.Exit(1)


@app.command(epilog=examples("corral version"))
def version() -> None:
    """Print the versions of Corral and of the libraries that it is built on."""
    for package in ("corral", "torch", "transformers"):
        print(describe_version(package))


app.command(epilog=examples("corral init", "corral init mine.yaml --model Qwen/Qwen2.5-1.5B-Instruct --data gsm8k"))(
    init
)
for verb, example in cluster_commands.VERBS.items():
    app.command(epilog=examples(example))(cluster_commands.on_linux(verb))
app.command(epilog=examples("corral migrate train.sh > recipe.yaml", "corral migrate train.sh --plan"))(migrate.migrate)
for name, group in {"bench": bench.app, "env": envs.app, "launch": launch.app, "retriever": retriever.app}.items():
    app.add_typer(group, name=name)


def group_verbs() -> None:
    """Gives each verb its place in `corral --help`. A verb that is in no panel is an error."""
    panels = {verb: panel for panel, verbs in PANELS.items() for verb in verbs.split()}
    order = list(panels)

    def name_of(command: Any) -> str:
        return str(command.name or command.callback.__name__)

    app.registered_commands.sort(key=lambda command: order.index(name_of(command)))
    command: Any  # CommandInfo or TyperInfo
    for command in (*app.registered_commands, *app.registered_groups):
        command.rich_help_panel = panels[name_of(command)]


group_verbs()


def main() -> None:
    """Errors that a user can fix or that a run can explain are one line each; others are bugs and show where."""
    if sys.platform == "win32":
        sys.exit(print_error("Corral does not run on Windows itself: use WSL, the Windows Subsystem for Linux", 2))
    logging.basicConfig(level=logging.ERROR)
    # Threads that wait for each other sleep instead of spinning: as fast on a quiet machine, and up to twice as fast
    # when anything else runs. Read when torch is loaded, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
            print_error("stopped at once; what was saved before is as it was")
        raise
    except RunInterrupted:
        sys.exit(INTERRUPTED)
    except UserError as error:
        sys.exit(print_error(str(error), 2))
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "aiohttp"):
            raise
        sys.exit(print_error(f"this needs Ray ({error}): {install_command('cluster')}", 2))
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        sys.exit(print_error(f"{error.strerror or str(error) or type(error).__name__}{where}"))
    except RunError as error:
        sys.exit(print_error(str(error)))
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        sys.exit(print_error(f"there is too little memory: {first_line(error)}"))


def lacks_memory(error: BaseException) -> bool:
    """Whether Python, or torch on a device or on the host, could not allocate memory."""
    is_of_torch = any(words in str(error) for words in ("out of memory", "allocate memory"))
    return isinstance(error, MemoryError) or is_of_torch


def print_error(message: str, code: int = 1) -> int:
    """Returns the exit code."""
    for line in without_controls(message).splitlines():
        print(add_chinese(f"error: {line}", os.environ), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
