"""Guides: the commands and the pieces of configuration in a page of text, and what Corral has for each of them.

A page is read line by line. What is a command and what is a configuration is known by how it begins and where it ends,
not by fences: text that was copied from a browser has none, and pages that were translated by a machine have them in
the wrong places. Nothing of a page is run.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from typing import Any

from corral.migrate.config import RawConfig, add_file
from corral.migrate.config_sources import (
    add_changes,
    finish,
    migrate_script,
    num_known_keys,
    programs,
    split_changes,
)
from corral.migrate.migration import Migration, RefusedConfig, with_overrides
from corral.migrate.outcome import LONGEST_SHOWN
from corral.migrate.shell import read_script
from corral.migrate.shell_parser import ShellParser
from corral.migrate.value_kinds import is_secret, plural
from corral.recipe.document import read_text
from corral.recipe.errors import RecipeError

GUIDE = re.compile(r"(.+\.(?:md|rst|txt))(?::([1-9]\d*))?", re.DOTALL)
"""`guide.md`, or `guide.md:98` for the training in line 98."""
FENCE = re.compile(r"\s*(?:(?:`{3,}|~{3,})[ \w{}.+-]*|\.\. [\w-]+::.*|:\w+:.*)$")
"""A fence, or a directive of reStructuredText with its options."""
INLINE = re.compile(r"(`+)(.+?)\1")
PROGRAMS = (
    r"ray|docker|podman|python3?|pip3?|uv|conda|bash|sh|source|torchrun|accelerate|srun|sbatch|salloc|scontrol|squeue|"
    r"dstack|kubectl|git|curl|wget|unzip|apt|apt-get|yum|dnf|yum-config-manager|systemctl|service|nvidia-smi|rocm-smi|"
    r"ibdev2netdev|export|ulimit|rm|mkdir|cd|cp|mv|ls|cat|echo|set|sleep|printenv|vim?|nano|huggingface-cli|hf|modelscope|"
    r"wandb|swanlab|tensorboard|sudo|nohup"
)
ASSIGNED = r"[A-Za-z_]\w*\+?=(?:\"[^\"]*\"|'[^']*'|[^\s=][^\s]*)?"
COMMAND = re.compile(
    rf"\s*(?:\$ )?((?:{ASSIGNED}\s+)*(?:(?:{PROGRAMS})(?=\s|$)|{ASSIGNED}|\w+=\(|#SBATCH |if [\[!]|"
    r"for (?:\w+ in|\(\()).*)",
    re.DOTALL,
)
MENTIONED = re.compile(rf"(?<![\w./=-])(?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) [\x20-\x7e]+")
"""A command within a sentence of another script than Latin."""
KEY = re.compile(r"(\s*)[\"']?[A-Za-z_][\w.,@/-]*[\"']?:(?:\s+\S.*|\s*)$")
NOT_LATIN = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af\uff00-\uffef]")
COMMENT = re.compile(r"^\s*#(?!SBATCH).*$|\s#\s.*$", re.MULTILINE)
PLACEHOLDER = re.compile(r"<[\w .-]+>")
MAX_LINES, MAX_OPEN = 200, 10
"""Lines, besides those that a backslash continues, in which a command has to be complete, and number of commands of a
page that may take as many without an end: a page is read in time that grows with its length."""

RULES: tuple[tuple[str, str, str, str], ...] = (
    ("ray", r"RAY_DEBUG=legacy|--ray-debugger-external", "corral up --debugger legacy", "the same on every node"),
    ("ray", r"ray start\b.*--head", "corral up", "with MASTER_ADDR, WORLD_SIZE and RANK=0 in the environment"),
    ("ray", r"start_ray\.sh", "corral up --head-file FILE", "with RANK, and FILE where all nodes see it"),
    ("ray", r"check_ray\.sh (\d+)", r"corral check \1", "waits for so many devices, and says what is missing"),
    ("ray", r"ray_head_ip\.txt", "", "a head file of an earlier cluster is refused; nothing has to be removed"),
    ("ray", r"ray start\b", "corral up", "the same as on the head, with a RANK of its own; or `corral up --join HOST`"),
    ("ray", r"ray stop\b", "corral down", "ends only what `corral up` started"),
    ("ray", r"ray status\b", "corral status", "on any node"),
    ("ray", r"ray job list\b", "corral jobs", ""),
    ("ray", r"ray job (logs|stop)\b", r"corral \1 JOB", ""),
    ("ray", r"ray job status\b", "corral status JOB", ""),
    ("ray", r"ray job submit\b", "corral submit recipe.yaml --no-wait", ""),
    ("ray", r"ray debug\b", "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=~/.corral/token ray debug", "Ray's own"),
    ("ray", r"import ray\b", "corral check DEVICES", ""),
    ("ray", r"RAY_DEBUG_POST_MORTEM", "corral train recipe.yaml --post-mortem", "an option; no variable is read"),
    ("retriever", r"retrieval_launch|retrieval_server|search_r1/search/", "corral retriever build CORPUS INDEX",
     "and `cluster.services: {retriever: {retriever: INDEX, port: 8000}}`, which starts one on every node"),
    ("data", r"data_preprocess/gsm8k", "corral data gsm8k --out data/gsm8k", "files of verl's layout work as they are"),
    ("data", r"data_preprocess/math", "corral data math --out data/math", "files of verl's layout work as they are"),
    ("data", r"data_preprocess|data_process", "", "rows of that layout are read as they are; only Python makes them"),
    ("data", r"transformers\.pipeline|(huggingface-cli|hf|modelscope) download", "",
     "`model.path` is a folder or a name on the hub, and is fetched when it is loaded"),
    ("slurm", r"sbatch|#SBATCH|\bsrun\b|salloc|scontrol|SLURM_", "corral launch slurm recipe.yaml",
     "writes the batch script; containers too, with `--container docker --image IMAGE`, and `--accelerator amd`"),
    ("dstack", r"dstack (apply|init)|^type: (task|fleet)|DSTACK_", "corral launch dstack recipe.yaml --image IMAGE",
     "writes the task; `dstack init` and `dstack apply` stay"),
    ("kubernetes", r"kubectl|^apiVersion: ", "corral launch kuberay recipe.yaml --image IMAGE", "writes the manifest"),
    ("install", r"container[-_]toolkit|docker-ce|yum-utils|(service|systemctl) .*docker|docker version",
     "corral launch host-setup > setup.sh", "docker and the container toolkit; --family apt or yum"),
    ("install", r"docker (pull|build|images?)\b", "docker build -f docker/Dockerfile -t corral .",
     "no image is published; build arguments choose engine and torch"),
    ("containers", r"(docker|podman) (run|exec|ps|rm)\b", "corral launch docker recipe.yaml --head HOST",
     "prints what to type on each node"),
    ("look", r"nvidia-smi|rocm-smi|ibdev2netdev|ulimit", "corral doctor", "devices, drivers, limits, networks"),
    ("look", r"model_merger|merge\b.*checkpoint", "corral export RUN OUT", ""),
    ("look", r"tensorboard\b", "corral view", "or TensorBoard, with `logging.trackers`"),
    ("install", r"git clone|\.zip\b", "git clone <Corral's repository> corral",
     "programs of other systems are not needed"),
    ("install", r"(pip3?|conda|uv)\b.*install|install\b.*ray", "pip install '.[cluster]'",
     "in Corral's checkout; -i and PIP_INDEX_URL as ever"),
    ("variables", r"MASTER_(ADDR|PORT)|WORLD_SIZE|\bRANK=", "the same variables",
     "`corral up` reads them; nodes are counted"),
    ("variables", r"VERL_USE_MODELSCOPE|USE_MODELSCOPE", "model.path: ms:OWNER/NAME",
     "the model comes from ModelScope"),
    ("variables", r"PYTHONPATH=", "", "Corral is an installed package"),
    ("variables", r"(NCCL|GLOO|RCCL|UCX|HSA|HIP|ROCR|CUDA|GPU|TORCH)_\w+=", "the same variables",
     "kept where they are set; containers get those that `--env NAME` names"),
    ("variables", r"VLLM_\w+=|SGLANG_\w+=", "the same variables", "kept for that engine; others ignore them"),
    ("variables", r"(HF|TRANSFORMERS|WANDB|SWANLAB)_\w+=", "cluster.environment: [NAME]",
     "sends a variable to all nodes"),
    ("change", r"\b(vim?|nano)\b.*\.ya?ml", "corral migrate FILE KEY=VALUE", "changes a key without an editor"),
)  # fmt: skip
"""Kind, pattern, what Corral has for it, and a note. The first that fits counts; those of clusters come first, since
their commands are wrapped in those of containers and of Slurm."""


@dataclass(frozen=True)
class Piece:
    line: int
    text: str
    is_config: bool = False


@dataclass(frozen=True)
class GuideAnswer:
    line: int
    text: str
    """What the page has, on one line."""
    kind: str
    ours: str
    """Corral's command or key. Empty: it is left out, and the note says why."""
    note: str
    found: Migration | RefusedConfig | None = None
    """What comes of it, where it is a training."""


@dataclass(frozen=True)
class Guide:
    path: Path
    answers: Sequence[GuideAnswer]
    line: int | None = None
    """The line of the training that the user names."""

    @property
    def trainings(self) -> "dict[int, Migration | RefusedConfig]":
        """What comes of its trainings, by line."""
        found = {one.line: one.found for one in self.answers if one.found is not None}
        return {line: one for line, one in found.items() if self.line in (None, line)}

    def training(self) -> Migration:
        """The one training of the page, or that in the line which was named."""
        found = list(self.trainings.values())
        if len(found) == 1:
            if isinstance(found[0], RefusedConfig):
                raise found[0]
            return found[0]
        where = f"{self.path}:{self.line}" if self.line else str(self.path)
        each = f"; name one: {', '.join(f'{self.path}:{line}' for line in self.trainings)}" if found else ""
        raise RecipeError(f"{where}: {len(found)} trainings begin here{each}")


def guide_named(word: str) -> tuple[Path, int | None] | None:
    """A page and the line of it that is meant, unless the word names something else."""
    match = GUIDE.fullmatch(word)
    return (Path(match[1]), int(match[2]) if match[2] else None) if match and "=" not in word else None


def read_guide(
    path: Path, system: str | None = None, defined: Mapping[str, str] | None = None, changes: Sequence[str] = ()
) -> list[GuideAnswer]:
    """What becomes of each command and each piece of configuration of a page, in the order of its lines."""
    pieces = list(pieces_of(read_text(path).splitlines()))
    kinds = [None if piece.is_config else training_kind(piece, path) for piece in pieces]
    foreign, own = split_changes(changes, system)
    answers = list[GuideAnswer]()
    for piece, kind in zip(pieces, kinds, strict=True):
        try:
            if piece.is_config:
                found = migrated_config(piece, path, system, defined, foreign)
            elif kind == "training":
                others = [one for one, other in zip(pieces, kinds, strict=True) if other is None or one is piece]
                found = migrate_script(script_of(others), path, system, defined, foreign)
            else:
                answers += [answer_of(piece, kind)]
                continue
        except RefusedConfig as refused:
            note = f"a configuration of {refused.title} without a recipe: {refused.problems[0]}"
            answers.append(GuideAnswer(piece.line, shown(piece), "training", "", note, refused))
        except RecipeError as error:
            if kind is not None:
                problem = re.sub(" is in none of these folders.*", " is not here", error.problems[0])
                note = f"where its files are; here: {problem.removeprefix(f'{path}: ')}"
                answers.append(GuideAnswer(piece.line, shown(piece), "training", "corral migrate", note))
        else:
            if found is None:
                answers += [one for one in [answer_of(piece, None)] if one.kind != "other"]
                continue
            found = with_overrides(found, own)
            what = "recipe" if piece.is_config else "training"
            ours = "corral submit recipe.yaml" if "ray job submit" in piece.text else "corral train recipe.yaml"
            note = f"a {what} of {found.title}" + "; what it leaves out is its example's" * piece.is_config
            answers.append(GuideAnswer(piece.line, shown(piece), what, ours, note, found))
    return answers


# --- from a page to its pieces


def pieces_of(page: Sequence[str]) -> Iterator[Piece]:
    lines = ["" if FENCE.match(line) else line.replace("\xa0", " ") for line in page]
    at = num_open = 0
    while at < len(lines):
        line = lines[at]
        if (match := COMMAND.match(line)) and not is_prose(match[1]):
            size = size_of_command([match[1], *lines[at + 1 :]], MAX_LINES if num_open < MAX_OPEN else 1)
            num_open += size == 0
            size = max(size, 1)
            first = match[1] if size > 1 else latin_part(match[1])
            yield Piece(at + 1, "\n".join([first, *lines[at + 1 : at + size]]))
            at += size
        elif KEY.match(line):
            size = size_of_config(lines[at:])
            yield Piece(at + 1, dedent("\n".join(lines[at : at + size])), is_config=True)
            at += size
        else:
            yield from (Piece(at + 1, text) for text in within_sentence(line))
            at += 1


def is_prose(text: str) -> bool:
    """Whether a line that begins with the name of a program is a sentence."""
    words = text.split()
    return len(words) > 3 and not re.search(r"[-/=$<>|\"'\\#\[;]", text)


def latin_part(text: str) -> str:
    """A command without what a sentence says behind it; quotes and comments stay."""
    match = NOT_LATIN.search(text)
    before = text[: match.start()] if match else text
    is_within = re.search(r"(^|\s)#", before) or before.count('"') % 2 or before.count("'") % 2
    return text if is_within else before.rstrip()


def size_of_command(lines: Sequence[str], max_tries: int) -> int:
    """Number of lines until quotes, brackets and branches are closed; 0 if they are not."""
    if lines[0].startswith("#"):
        return 1
    for size in range(1, len(lines) + 1):
        if lines[size - 1].rstrip(" ").endswith("\\") and "".join(lines[size : size + 1]).strip():
            continue
        max_tries -= 1
        if max_tries < 0:
            break
        try:
            ShellParser(PLACEHOLDER.sub("it", "\n".join(lines[:size])), "guide").script()
        except RecipeError:
            continue
        return size
    return 0


def size_of_config(lines: Sequence[str]) -> int:
    """Number of lines with keys, lists and comments at the first one's column, or with anything right of it."""
    indent = len(lines[0]) - len(lines[0].lstrip())
    last = 0
    for number, line in enumerate(lines):
        text = line.strip()
        column = len(line) - len(line.lstrip())
        if not text or text.startswith("#"):
            continue
        is_more = column > indent or (column == indent and (KEY.match(line) or text.startswith("- ")))
        if not is_more or (number and COMMAND.match(line) and column <= indent):
            break
        last = number
    return last + 1


def within_sentence(line: str) -> Iterator[str]:
    spans = [match[2].strip() for match in INLINE.finditer(line)]
    if not spans and NOT_LATIN.search(line):
        spans = [match[0].strip() for match in MENTIONED.finditer(line)]
    yield from (span for span in spans if " " in span and COMMAND.match(span))


# --- from a piece to what Corral has for it


def training_kind(piece: Piece, path: Path) -> str | None:
    """Whether a command starts a training, or a run of another kind, which no recipe comes of."""
    try:
        return "training" if list(programs(read_script(piece.text, str(path)).commands, str(path))) else None
    except RecipeError as error:
        return error.problems[0] if "which is not migrated" in error.problems[0] else None


def script_of(pieces: Sequence[Piece]) -> str:
    """The commands as one script, each in its line of the page: they set each other's variables."""
    lines = list[str]()
    for piece in pieces:
        if not piece.is_config and len(lines) < piece.line:
            lines += [""] * (piece.line - 1 - len(lines))
            lines += piece.text.splitlines()
    return "\n".join(lines) + "\n"


def migrated_config(
    piece: Piece, path: Path, system: str | None, defined: Mapping[str, str] | None, changes: Sequence[str]
) -> Migration | None:
    """None: few of its keys are known, so it is something else."""
    config = RawConfig(defined)
    add_file(config, path, text="\n" * (piece.line - 1) + piece.text)
    if 2 * num_known_keys(config, system) <= len(config.flat()):
        return None
    add_changes(config, changes)
    return finish(config, system, [])


def answer_of(piece: Piece, other_kind: str | None) -> GuideAnswer:
    text = shown(piece)
    if other_kind is not None:
        return GuideAnswer(piece.line, text, "training", "", other_kind)
    written = COMMENT.sub("", piece.text)
    flat = re.sub(r"\s*\\\n\s*", " ", written)
    for kind, pattern, ours, note in RULES:
        if match := re.search(pattern, flat, re.MULTILINE):
            return GuideAnswer(piece.line, text, kind, match.expand(ours) if "\\" in ours else ours, note)
    return GuideAnswer(piece.line, text, "other", "", "nothing of Corral's")


def shown(piece: Piece) -> str:
    first, *more = [line.strip() for line in piece.text.splitlines() if line.strip()] or [""]
    first = re.sub(r"([\w.]+)=(\S+)", lambda one: f"{one[1]}=***" if is_secret(one[1]) else one[0], first)
    return first.removesuffix("\\").rstrip() + (f" ... ({len(more) + 1} lines)" if more else "")


# --- as text


def guide_text(guide: Guide) -> str:
    """A line for what the page has, and one for what Corral has; what has the same answer is together."""
    path, num_configs = guide.path, sum(one.kind == "recipe" for one in guide.answers)
    lines = [f"{path}: {plural(len(guide.answers) - num_configs, 'command')}, {plural(num_configs, 'recipe')}"]
    for (ours, note), some in groupby(distinct(guide.answers), key=lambda one: (one.ours, one.note)):
        same = list(some)
        text = "; ".join(one.text for one in same)
        text = text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."
        lines += ["", f"{path}:{same[0].line}: {text}"]
        lines.append("    " + (f"{ours}  ({note})" if ours and note else ours or f"left out: {note}"))
    if len(guide.trainings) > 1:
        lines += ["", "there are several trainings; `corral migrate` takes one by its line, as in:"]
        lines += [f"    corral migrate {path}:{line} > recipe.yaml" for line in guide.trainings]
    return "\n".join(lines)


def distinct(answers: Sequence[GuideAnswer]) -> list[GuideAnswer]:
    """Without what a page says a second time, and what is of no concern."""
    first: dict[tuple[str, str], GuideAnswer] = {}
    for one in answers:
        if one.kind != "other":
            first.setdefault((one.text, str(one.line) if one.found else one.ours), one)
    return list(first.values())


def as_list(answers: Sequence[GuideAnswer]) -> list[dict[str, Any]]:
    """The answers for programs."""
    return [
        {"line": one.line, "text": one.text, "kind": one.kind, "ours": one.ours, "note": one.note} for one in answers
    ]
