"""Where the configuration of another system is: in a script, a command, files. Whatever it is, it is only read."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from pkgutil import iter_modules

from corral.migrate import engines
from corral.migrate.config import RawConfig, add_file, add_override, leaves
from corral.migrate.migration import Migration, RefusedConfig, migrate, value_at, with_overrides, with_setting
from corral.migrate.outcome import ABSENT, FROM_MODELSCOPE, ForeignValue, mapped
from corral.migrate.shell import ShellCommand, ShellScript, read_script
from corral.migrate.shell_expansion import ShellValue
from corral.migrate.table import KeyTable, RecipeValue
from corral.migrate.table_file import load_table
from corral.migrate.value_kinds import format_value
from corral.recipe.document import read_text
from corral.recipe.errors import RecipeError
from corral.recipe.keys import find_key
from corral.recipe.schema import Recipe

TABLES = {
    "verl": "verl", "search_r1": "verl", "verl_sft": "verl",
    "roll": "roll", "roll_sft": "roll", "roll_dpo": "roll", "rlinf": "rlinf",
}  # fmt: skip
"""Systems and kinds of run, with the packages of the functions that their tables name besides those of `engines.py`."""
BASES = {"search_r1": "verl", "verl_sft": "verl", "roll_sft": "roll", "roll_dpo": "roll_sft"}
"""Tables that other tables are based on."""
ALIKE = {"verl": ("verl", "search_r1"), "roll": ("roll", "roll_sft", "roll_dpo")}
"""Tables of a system of which the first that knows most of the keys is taken: Search-R1 is a verl with keys of its own,
and ROLL's pipelines have keys in common."""

PROGRAMS = {
    "verl": re.compile(r"(?:[\w./-]*[./])?main_(?:ppo|ppo_sync|ppo_v0|ppo_format|dapo)(?:\.py)?"),
    "verl_sft": re.compile(r"(?:[\w./-]*[./])?(?:fsdp_)?sft_trainer(?:_ray)?(?:\.py)?"),
    "roll": re.compile(r"(?:[\w./-]*/)?(?:start_\w+_pipeline\.py|run_\w*pipeline\w*\.sh)"),
    "rlinf": re.compile(r"(?:[\w./-]*/)?(?:main_(?:math|math_pipeline|grpo|reasoning)\.py|run_main_\w+\.sh)"),
}
"""Programs that start a training, and so end whatever comes before them: Ray, Slurm, containers."""
OTHER_KINDS = {
    r"train_v\wm?_sft": "supervised fine-tuning (see docs/sft.md)",
    r"start_distill\w*|main_gkd": "distillation on answers that the rows have (see docs/distillation.md)",
    r"main_generation\w*|start_\w+_rollout_pipeline": "rollouts without training",
    r"main_eval": "an evaluation",
    r"train_embodied_agent|train_async|train_offline_rl": "embodied reinforcement learning",
    r"train_reward_model": "the training of a reward model",
}
"""Kinds of run that no recipe comes of, by the last part of a program's name."""
OWN_PROGRAM = re.compile(r"recipe\.(?!dapo\.main_dapo\b)[\w.]+|verl\.experimental\.[\w.]+")
"""Programs beside verl's trainer, each with code and keys of its own."""
TORCHRUN = {"nnodes": "trainer.nnodes", "nproc_per_node": "trainer.n_gpus_per_node"}
MAX_PROGRAM_LENGTH = 300
SHELL = re.compile(r"(?:.*/)?(?:ba|da|z|k)?sh")
CHANGE = re.compile(r"\+{0,2}[a-z]\w*(?:\.\w+)+=.*", re.DOTALL)
OTHER_COMMANDS = ("echo", "printf", "grep", "pkill", "kill", "ps", "cat", "ls", "cp", "mv", "sed", "vim", "source", ".")
"""Commands that may name a program and do not start it."""
OPTION = re.compile(r"--?(config[-_]path|config[-_]name|config[-_]dir|cp|cn|cd)(?:=(.*))?", re.DOTALL)
OPTIONS = {"cp": "path", "cn": "name", "cd": "path", "path": "path", "name": "name", "dir": "path"}
GPU_NAME = re.compile(
    r"^#SBATCH\b.*?\s(?:--gres[= ]\S*?gpu:|--gpus(?:-per-\w+)?[= ]|-G ?)([A-Za-z][\w.-]*)", re.MULTILINE
)
"""The name of GPUs in the options of Slurm: `--gres=gpu:h100:8`, `--gpus-per-node=a100_80gb:8`."""
GPU_MEMORY = {"h100": 80, "h800": 80, "h20": 96, "h200": 139, "b200": 180, "b300": 268, "l40s": 48, "rtx4090": 24}
"""GiB of GPUs by name, where nearly all of a name have the same."""
MODELSCOPE = re.compile(r"^[^#\n]*\bVERL_USE_MODELSCOPE=[\"']?(?:true|1)\b", re.MULTILINE | re.IGNORECASE)
"""The variable by which verl takes models from ModelScope."""
OWN_CONFIGS = re.compile(r"ppo_(megatron_|veomni_)?trainer|dapo_(megatron_)?trainer|config")
"""Names of verl's own configurations: all that they say is in its table."""


@dataclass
class TrainingCommand:
    """A command that starts a training: its arguments, where it was found, and what looks wrong around it."""

    system: str | None = None
    words: list[ShellValue] = field(default_factory=list)
    """What stands behind the program's name."""
    program: str = ""
    file: str = "command"
    folder: Path = Path()
    """The folder in which the command would run."""
    line: int = 0
    pitfalls: list[str] = field(default_factory=list)
    launched: list[ShellValue] = field(default_factory=list)
    """What stands before the program, as overrides: on how many devices it is launched."""
    question: str = ""
    """The condition of the script that would have to be decided otherwise for this to be the command."""

    @property
    def texts(self) -> list[str]:
        return [self.program, *(word.text for word in self.words)]


def migrate_file(
    path: Path, system: str | None = None, defined: Mapping[str, str] | None = None, changes: Sequence[str] = ()
) -> Migration:
    """Raises a RecipeError with all that is wrong. `changes`: `key=value` of the other system or of the recipe."""
    foreign, own = split_changes(changes, system)
    return with_overrides(read_file(path, system, defined, foreign), own)


def split_changes(changes: Sequence[str], system: str | None) -> tuple[list[str], list[str]]:
    """Changes to keys of the other system, by their names or by their ends (`rollout.n=5`), and those to the recipe."""
    tables = [table_of(name) for name in candidates(system)]
    names = {row.key for table in tables for row in table.rows if "*" not in row.key}
    foreign, own = list[str](), list[str]()
    for change in changes:
        key, equals, value = change.partition("=")
        ends = [key] if key in names else [name for name in names if name.endswith(f".{key}")]
        if len(ends) == 1 and find_key(tuple(key.split("."))) is None:
            foreign.append(f"{ends[0]}{equals}{value}")
        else:
            own.append(change)
    return foreign, own


def read_file(
    path: Path, system: str | None, defined: Mapping[str, str] | None, changes: Sequence[str] = ()
) -> Migration:
    if path.suffix in (".yaml", ".yml"):
        config = RawConfig(defined)
        add_file(config, path)
        add_changes(config, changes)
        return finish(config, system, [])
    return migrate_script(read_text(path), path, system, defined, changes)


def migrate_script(
    text: str, path: Path, system: str | None, defined: Mapping[str, str] | None, changes: Sequence[str] = ()
) -> Migration:
    """What the one training of a script amounts to, whatever the text leaves open."""
    first, *others = read_sources(text, path, defined)
    if match := MODELSCOPE.search(text):
        first.pitfalls.append(f"{path}:{text[: match.end()].count(chr(10)) + 1}: {FROM_MODELSCOPE}")
    migration = with_named_gpus(migrate_source(first, system, defined, changes), text, path)
    problems, remarks = list[str](), list[str]()
    for other in others:
        try:
            found = migrate_source(other, system, defined, changes)
        except RecipeError as error:
            remarks.append(f"if it were not for {other.question}, there would be no recipe: {error.problems[0]}")
            continue
        for key in dict.fromkeys([*migration.settings, *found.settings]):
            values = [value_at(one.recipe.model_dump(), key) for one in (migration, found)]
            if values[0] != values[1]:
                is_text = key[0] != "algorithm" and all(isinstance(value, str | None) for value in values)
                shown = " or ".join("nothing" if value is ABSENT else format_value(value) for value in values)
                open_key = f"`{'.'.join(key)}` is {shown}: {other.question} decides"
                (remarks if is_text else problems).append(open_key)
    pitfalls = (*migration.pitfalls, *dict.fromkeys(remarks))
    if problems:
        what = [f"{one}, and nothing is run here; give the variables with --define" for one in problems]
        raise RefusedConfig(what, migration.title, migration.entries, pitfalls)
    return replace(migration, pitfalls=pitfalls)


def with_named_gpus(migration: Migration, text: str, path: Path) -> Migration:
    """The migration with what the GPUs hold that a job script asks Slurm for by name."""
    match, key = GPU_NAME.search(text), ("cluster", "device_memory")
    if match is None or all(one[0] != key[0] for one in migration.settings):
        return migration
    written = re.findall(r"(\d+)gb", name := match[1].lower())  # a part of a GPU has its own behind that of the whole
    memory = int(written[-1]) if written else GPU_MEMORY.get(re.split("[-_.]", re.sub("^nvidia[-_]", "", name))[0])
    if memory is None:
        return migration
    given = ForeignValue("#SBATCH", match[1], f"{path}:{text[: match.start()].count(chr(10)) + 1}")
    return with_setting(migration, key, RecipeValue(memory, given, mapped(key, memory, f"GiB of a {match[1]}")))


def add_changes(config: RawConfig, changes: Sequence[str]) -> None:
    for change in changes:
        add_override(config, change, "command line")


def migrate_words(
    words: Sequence[str], system: str | None = None, defined: Mapping[str, str] | None = None
) -> Migration:
    """A whole command, or where the system is given also only what comes behind its program's name."""
    values = [ShellValue(word) for word in words]
    source = find_program([ShellCommand(values, 0, False)], "command") or TrainingCommand(words=values)
    if source.system is None and system is None:
        raise RecipeError(
            f"`{' '.join(words)[:60]}` does not start a training that is known; say of which system it is: --system"
        )
    return migrate_source(source, system, defined)


def is_own(path: Path) -> bool:
    """Whether it is a recipe of ours already."""
    if path.suffix not in (".yaml", ".yml"):
        return False
    config = RawConfig()
    add_file(config, path)
    return {"name", "model"} <= config.values.keys() <= Recipe.model_fields.keys()


# --- scripts


def read_sources(text: str, path: Path, defined: Mapping[str, str] | None, folder: str = ".") -> list[TrainingCommand]:
    """The command that starts a training, and others that may, where the text leaves open what is done."""
    script = read_script(text, str(path), defined, folder)
    ways = [("", script), *((f"{path}:{one.node.line}: `{one.what}`", way) for one, way in script.other_ways)]
    sources: list[TrainingCommand] = []
    for question, way in ways:
        source = find_program(way.commands, str(path))
        if source is not None and all(source.texts != other.texts for other in sources):
            source.folder, source.question = path.parent, question
            source.pitfalls = [*script.broken_lines, *source.pitfalls, *lost_in_jobs(way, path)]
            sources.append(source)
    if not sources:
        if hint := next(filter(None, (retriever_instead(one, path) for one in script.commands)), None):
            raise RecipeError(hint)
        known = "main_ppo, sft_trainer (verl), start_..._pipeline.py (ROLL), main_math.py or run_main_....sh (RLinf)"
        ends = f"; it ends itself in line {script.exit_line}" if script.exit_line else ""
        raise RecipeError(f"{path}: no command in it starts a training that is known: {known}{ends}")
    return sources


def retriever_instead(command: ShellCommand, path: Path) -> str | None:
    """What stands for Search-R1's retriever, where a command starts that."""
    words = command.texts
    if not any(word.rpartition("/")[2] == "retrieval_server.py" for word in words):
        return None
    given = {word: after for word, after in pairwise([*words, ""]) if word.startswith("--")}
    corpus = given.get("--corpus_path", "corpus.jsonl")
    index = Path(given.get("--index_path", "index")).parent / "index"
    encoder = given.get("--retriever_model", "ENCODER")
    kind = "" if given.get("--retriever_name") == "bm25" else f" --kind flat --encoder {encoder} --half"
    return (
        f"{path}:{command.line}: starts Search-R1's retriever, which is not migrated, and no training. Its index is "
        f"not read: make one with `corral retriever build {corpus} {index}{kind}`. Then every node has a retriever by "
        f"`cluster.services: {{retriever: {{retriever: {index}, port: 8000}}}}` in the recipe, or serve it yourself: "
        f"`corral retriever serve {index} --topk {given.get('--topk', 3)}`; see docs/retrieval.md"
    )


def lost_in_jobs(script: ShellScript, path: Path) -> Iterator[str]:
    if any(command.texts[:3] == ["ray", "job", "submit"] for command in script.commands):
        limits = ["ulimit"] * any(one.texts[0] == "ulimit" for one in script.commands)
        if lost := [*dict.fromkeys(script.exported), *limits]:
            yield (
                f"{path}: {', '.join(lost)} apply to the shell that submits, not to the job; "
                "name variables in `cluster.environment` or `corral submit --env`"
            )


def find_program(commands: Sequence[ShellCommand], file: str) -> TrainingCommand | None:
    found = list(programs(commands, file))
    if len(found) > 1:
        lines = " and ".join(str(source.line) for source in found)
        raise RecipeError(f"{file}: {len(found)} commands in it start a training (lines {lines}); keep one of them")
    return found[0] if found else None


def programs(commands: Sequence[ShellCommand], file: str) -> Iterator[TrainingCommand]:
    for number, command in enumerate(commands):
        if command.texts[0] in OTHER_COMMANDS:
            continue
        for place, word in enumerate(command.words):
            before = command.words[place - 1].text if place else ""
            if kind := other_kind(word.text, before):
                raise RecipeError(f"{file}:{command.line}: `{word.text}` is {kind}, which is not migrated")
            if system := program_of(word.text, before):
                source = TrainingCommand(system, command.words[place + 1 :], word.text, file, line=command.line)
                source.launched += launched_on(command.words[:place]) if system == "verl_sft" else []
                source.pitfalls += address_problems(command.words[:place], file)
                source.pitfalls += strays(commands[number + 1 :], file)
                yield source
                break
            is_shell = any(SHELL.fullmatch(one.text) for one in command.words[:place])
            if is_shell and re.fullmatch("-[a-z]*c", before) and any(map(str.isspace, word.text)):
                yield from programs(read_script(word.text, file).commands, file)


def launched_on(before: Sequence[ShellValue]) -> Iterator[ShellValue]:
    """Nodes and devices as torchrun has them, under the names that they have in verl's configuration."""
    for word, behind in zip(before, [*before[1:], ShellValue("")], strict=True):
        name, equals, text = word.text.lstrip("-").replace("-", "_").partition("=")
        if word.text.startswith("-") and name in TORCHRUN:
            value = replace(word, text=text) if equals else behind
            yield replace(value, text=f"{TORCHRUN[name]}={value.text}", line=word.line)


def program_of(word: str, before: str) -> str | None:
    """The system of a program: a module behind `-m`, or a file."""
    if len(word) > MAX_PROGRAM_LENGTH or not (before == "-m" or word.endswith((".py", ".sh"))):
        return None
    return next((name for name, program in PROGRAMS.items() if program.fullmatch(word)), None)


def other_kind(word: str, before: str) -> str | None:
    """What kind of run a program starts, where Corral has no recipe for it."""
    if len(word) > MAX_PROGRAM_LENGTH or not (before == "-m" or word.endswith(".py")):
        return None
    name = re.split("[./]", word.removesuffix(".py"))[-1]
    own = "a program with code of its own, not verl's trainer" if OWN_PROGRAM.fullmatch(word) else None
    return next((kind for program, kind in OTHER_KINDS.items() if re.fullmatch(program, name)), own)


def address_problems(before: Sequence[ShellValue], file: str) -> Iterator[str]:
    """Warnings about the address of `ray job submit --address=...`."""
    for place, word in enumerate(before):
        if word.text != "--address" and not word.text.startswith("--address="):
            continue
        address = word.text.partition("=")[2] or (before[place + 1].text if place + 1 < len(before) else "")
        if not address.startswith(("http://", "https://", "ray://")):
            yield f"{file}:{word.line}: the address `{address}` of `ray job submit` lacks `http://`"
        if "<" in address:
            yield f"{file}:{word.line}: the address `{address}` still has to be filled in"


def strays(behind: Sequence[ShellCommand], file: str) -> Iterator[str]:
    """Changes that a pipe gave to another program, such as `tee`, or that a broken line cut off."""
    for command in behind:
        first, *rest = command.words
        if CHANGE.fullmatch(first.text):
            yield f"{file}:{first.line}: `{first.text}` begins a command of its own, and is not passed to the training"
            continue
        if not command.piped:
            return
        for word in rest:
            if CHANGE.fullmatch(word.text):
                yield f"{file}:{word.line}: `{word.text}` is passed to {first.text}, not to the training"


# --- from what was found to a recipe


def migrate_source(
    source: TrainingCommand, system: str | None, defined: Mapping[str, str] | None, changes: Sequence[str] = ()
) -> Migration:
    config, chosen = RawConfig(defined), system or source.system
    assert chosen is not None
    options, words = split_options(source.words)
    if chosen == "rlinf" and source.program.endswith(".sh") and words and "=" not in words[0].text:
        options["name"] = words.pop(0)
    if file := config_file(source, chosen, options):
        add_file(config, file)
    elif not words:
        raise RecipeError(f"{source.file}: the command says nothing of what to train; name its configuration")
    add_words(config, [*source.launched, *words], source)
    add_changes(config, changes)
    return finish(config, chosen, source.pitfalls)


def split_options(words: Sequence[ShellValue]) -> tuple[dict[str, ShellValue], list[ShellValue]]:
    """Hydra's and ROLL's `--config_path X --config_name Y`, apart from the changes."""
    options: dict[str, ShellValue] = {}
    rest = list[ShellValue]()
    queue = list(words)
    while queue:
        word = queue.pop(0)
        match = OPTION.fullmatch(word.text)
        if match is None:
            rest.append(word)
            continue
        name = OPTIONS[re.split("[-_]", match[1])[-1]]
        following = queue.pop(0) if queue and match[2] is None else ShellValue("")
        options[name] = following if match[2] is None else ShellValue(match[2], word.line)
    return options, rest


def config_file(source: TrainingCommand, system: str, options: Mapping[str, ShellValue]) -> Path | None:
    """The YAML file that a command names. None: it names none, or one of the other system's own."""
    if "name" not in options:
        if source.program.endswith(".sh"):
            raise RecipeError(f"{source.file}: {source.program} is a script of its own; give that to `corral migrate`")
        return None
    name, folder = options["name"].text.removesuffix(".yaml"), options["path"].text if "path" in options else ""
    program = Path(source.program).parent
    below = [Path(folder), program / folder, program / "config", Path("examples") / folder]
    tried = [
        root / one / f"{name}.yaml" for root in dict.fromkeys((Path(), source.folder)) for one in dict.fromkeys(below)
    ]
    found = next((path for path in tried if path.is_file()), None)
    if found is None and not (system in ("verl", "search_r1") and OWN_CONFIGS.fullmatch(name)):
        where = ", ".join(dict.fromkeys(str(path.parent) for path in tried))
        raise RecipeError(f"{source.file}: the configuration {name}.yaml is in none of these folders: {where}")
    return found


def add_words(config: RawConfig, words: Sequence[ShellValue], source: TrainingCommand) -> None:
    seen: dict[str, str] = {}
    for word in words:
        where = f"{source.file}:{word.line}" if word.line else source.file
        if word.text == "...":
            source.pitfalls.append(f"{where}: `...` stands for more; only what is written counts")
            continue
        if word.unknown is not None:
            config.problems.append(
                f"{where}: `{word.text}` needs what `{word.unknown}` gives, and nothing is run here; "
                "write the value, or give the variable with --define NAME=VALUE"
            )
            continue
        source.pitfalls += [warning for warning in word.warnings if warning not in source.pitfalls]
        key = word.text.partition("=")[0].lstrip("+")
        if key in seen:
            source.pitfalls.append(f"{where}: `{key}` is given twice ({seen[key]}); the last one counts")
        seen[key] = where
        add_override(config, word.text, where)


def candidates(system: str | None) -> tuple[str, ...]:
    return tuple(TABLES) if system is None else ALIKE.get(system, (system,))


def finish(config: RawConfig, system: str | None, pitfalls: list[str]) -> Migration:
    tables = [table_of(name) for name in candidates(system)]
    written = [ForeignValue(".".join(path), value, config.where(path)) for path, value in leaves((), config.values)]
    if kind := next(filter(None, (table.other_kind(written) for table in tables)), None):
        raise RecipeError(kind)
    given = config.flat()
    best = max(tables, key=lambda table: num_known(table, given))
    if not num_known(best, given) and system is None:
        raise RecipeError(
            config.problems or "none of its keys is known of verl, Search-R1, ROLL or RLinf; is it one of theirs?"
        )
    if config.missing:
        names = ", ".join(dict.fromkeys(config.missing))
        usual = f"{best.title}'s usual values are taken"
        pitfalls = [*pitfalls, f"`defaults` names files that are not there: {names}; {usual}"]
    migration = migrate(best, given, [*pitfalls, *dict.fromkeys(config.notes)], config.problems)
    if kind := best.lacks(written):
        raise RecipeError(kind)
    return migration


def num_known(table: KeyTable, given: Iterable[str]) -> int:
    return sum(table.row(table.canonical(key)) is not None for key in given)


def num_known_keys(config: RawConfig, system: str | None) -> int:
    """The number of keys of a configuration that the table knows which knows most of them."""
    return max(num_known(table_of(name), config.flat()) for name in candidates(system))


@cache
def table_of(name: str) -> KeyTable:
    package = import_module(f"corral.migrate.{TABLES[name]}")
    modules = [import_module(f"{package.__name__}.{module.name}") for module in iter_modules(package.__path__)]
    return load_table(name, engines, *modules, base=table_of(BASES[name]) if name in BASES else None)
