"""Writes the tables of the documentation that follow from the code: every key of the recipe, and every preset.

    python docs/generate_recipe_reference.py

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; the text around it is written by hand.
`tests/recipe/test_reference_is_current.py` fails when a table is not what this program would write.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

from corral.recipe import schema
from corral.recipe.keys import Key, all_keys, describe, dotted
from corral.recipe.presets import CLIPS, FORCED_AGGREGATION, PRESETS, resolve_algorithm
from corral.recipe.schema import Recipe, Section
from corral.recipe.words import ADVANTAGES, AGGREGATIONS, LOSSES

DOCS = Path(__file__).parent

MEANINGS = {
    "model": "What is trained.",
    "model.trust_remote_code": "Run Python code that comes with the model. It can do anything your account can.",
    "data": "What is asked.",
    "data.max_prompt_tokens": "Longest prompt, after the chat template.",
    "data.shuffle": "Another order in every epoch, which follows from `seed` and the epoch's number.",
    "environment": "What answers the model, and what its answers are worth.",
    "environment.reward": "The function that scores answers.",
    "environments.*": "One of several; `*` is its tag. As `environment`, and:",
    "environments.*.reward": "As `environment.reward`.",
    "rollout": "How answers are sampled.",
    "rollout.engine": "What generates.",
    "rollout.temperature": "Logits are divided by it, in sampling and in training alike.",
    "rollout.top_p": "Sample from the likeliest tokens that have this probability together. 1: all tokens.",
    "rollout.min_p": "Leave out tokens less likely than this share of the likeliest one. 0: all tokens.",
    "rollout.max_turns": "Replies of the model in one trajectory.",
    "batch": "How much is played and learnt in a step.",
    "batch.prompts_per_step": "Prompts drawn in each step.",
    "batch.samples_per_prompt": "Answers sampled to each prompt: its group.",
    "algorithm": "What is made of rewards.",
    "algorithm.advantage": "How much better than expected a token was.",
    "algorithm.loss": "What is minimised, token by token.",
    "algorithm.aggregation": "How the losses of tokens become one number.",
    "algorithm.clip_low": "How far below 1 the ratio of new to old probability counts.",
    "algorithm.clip_high": "How far above 1.",
    "algorithm.dual_clip": "Upper bound of the ratio where the advantage is negative (loss ppo).",
    "algorithm.gamma": "Discount per generated token.",
    "algorithm.sapo_tau_positive": "SAPO's temperature where the advantage is positive.",
    "algorithm.sapo_tau_negative": "SAPO's temperature elsewhere.",
    "algorithm.dro_beta": "Weight of DRO's quadratic term.",
    "algorithm.dppo_threshold": "Divergence beyond which DPPO drops a token.",
    "algorithm.entropy_coefficient": "Weight of an entropy bonus.",
    "algorithm.kl": "Distance to the reference model.",
    "algorithm.kl.estimator": "How the KL of a token is estimated; see [algorithms](algorithms.md#kl).",
    "algorithm.kl.coefficient": "Weight of the KL; with an adaptive controller, the first one.",
    "algorithm.kl.controller": "Whether the coefficient stays, or follows the KL towards `target`.",
    "algorithm.dynamic_sampling.enabled": "Whether to.",
    "algorithm.overlong.buffer_tokens": "Tokens before the limit in which the penalty grows from 0.",
    "algorithm.overlong.penalty": "At the limit.",
    "optimizer": "AdamW for the model.",
    "optimizer.learning_rate": "After warm-up.",
    "optimizer.betas": "AdamW's.",
    "optimizer.epsilon": "AdamW's.",
    "optimizer.weight_decay": "AdamW's.",
    "optimizer.max_gradient_norm": "A longer gradient is scaled down to this.",
    "optimizer.warmup_steps": "Updates in which the learning rate rises linearly.",
    "optimizer.schedule": "What the learning rate does afterwards, until the last update.",
    "optimizer.min_learning_rate_ratio": "Where linear and cosine end, as a share of the learning rate.",
    "critic": "The value model of PPO. Only the advantage gae has one.",
    "critic.optimizer": "AdamW for the critic.",
    "critic.optimizer.learning_rate": "After warm-up.",
    "critic.optimizer.betas": "AdamW's.",
    "critic.optimizer.epsilon": "AdamW's.",
    "critic.optimizer.weight_decay": "AdamW's.",
    "critic.optimizer.max_gradient_norm": "A longer gradient is scaled down to this.",
    "critic.optimizer.warmup_steps": "Updates in which the learning rate rises linearly.",
    "critic.optimizer.schedule": "What the learning rate does afterwards, until the last update.",
    "critic.optimizer.min_learning_rate_ratio": "Where linear and cosine end, as a share of the learning rate.",
    "critic.value_clip": "How far a value may move from the one it had when the batch was scored. null: any way.",
    "reference": "The frozen model that KL is measured to. There is none without KL.",
    "train": "How gradients are computed.",
    "schedule": "How long, and how far playing and learning go hand in hand.",
    "schedule.steps": "Steps to train.",
    "validation": "When and how the held-out score is measured.",
    "validation.before_training": "Measure before the first step.",
    "validation.after_training": "Measure after the last step.",
    "validation.top_p": "As `rollout.top_p`.",
    "validation.max_prompts": "Use only the first so many rows. Not set: all.",
    "checkpoint": "What is saved, and where a run goes on.",
    "checkpoint.keep": "Newest checkpoints that are kept.",
    "checkpoint.at_end": "Save one after the last step.",
    "logging": "What is written down.",
    "logging.project": "The project's name in trackers that have projects.",
    "cluster.nodes": "Machines.",
    "seed": "Of the order of rows, of every sample, and of everything else that is drawn.",
}
"""Of the keys that say nothing about themselves in the schema."""

RESOLVED_NAMES = {
    "dynamic_sampling_enabled": "dynamic_sampling",
    "dynamic_sampling_max_rounds": "max_rounds",
    "overlong_buffer_tokens": "overlong_buffer",
}
"""Keys of the algorithm that are called something else once they are decided."""

DECIDED_ELSEWHERE = {"algorithm.aggregation_norm", "algorithm.correction.cap"}
"""Keys whose value depends on more than the preset; their meaning says on what."""


def main() -> None:
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


def generated() -> dict[Path, str]:
    """The documents as they should be, by file."""
    return {
        DOCS / "recipe.md": with_tables("recipe.md", {"keys": key_tables}),
        DOCS / "algorithms.md": with_tables(
            "algorithms.md",
            {
                "presets": preset_table,
                "advantages": lambda: word_table("advantage", ADVANTAGES),
                "losses": loss_table,
                "aggregations": lambda: word_table("aggregation", AGGREGATIONS),
            },
        ),
    }


def with_tables(file: str, tables: dict[str, Callable[[], str]]) -> str:
    text = (DOCS / file).read_text(encoding="utf-8")
    for name, make in tables.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        pattern = re.compile(f"{begin}.*?{end}", re.DOTALL)
        assert len(pattern.findall(text)) == 1, f"{file} must have one place for the table `{name}`"
        text = pattern.sub(lambda _, table=f"{begin}\n\n{make()}\n\n{end}": table, text)
    return text


# --- keys of the recipe


def key_tables() -> str:
    """A table for the keys at the top, and one for each section."""
    sections = [(), *(key.path for key in all_keys().values() if key.section is not None)]
    return "\n\n".join(key_table(section) for section in sections)


def key_table(section: tuple[str, ...]) -> str:
    keys = [key for key in all_keys().values() if key.path[:-1] == section]
    if not section:
        keys = [key for key in keys if key.section is None]
        title, introduction = "### At the top", "The other keys at the top are the sections below."
    else:
        key = all_keys()[section]
        title, introduction = f"### `{dotted(section)}`", meaning(key)
        if key.optional:
            introduction += " The whole section may be left out."
    rows = [
        f"| `{dotted(key.path)}` | {cell(kind(key))} | {default(key)} | {cell(meaning(key))} |"
        for key in keys
        if key.section is None
    ]
    header = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"] if rows else []
    return "\n".join([title, "", introduction, *([""] if rows else []), *header, *rows])


def kind(key: Key) -> str:
    if key.free_form:
        return "a section with keys of your own"
    if key.named_sections:
        return "sections with names of your own"
    words = describe(key.annotation).removesuffix(" or null").removeprefix("one of ")
    return re.sub(r"\ba whole number, at least 1$", "a whole number from 1", words)


def default(key: Key) -> str:
    if key.required:
        return "required"
    if key.default is not None:
        return code(key.default)
    decided = [getattr(resolve_algorithm(recipe_with(name)), decided_as(key), None) for name in PRESETS]
    if set(decided) == {None} or dotted(key.path) in DECIDED_ELSEWHERE:
        return "not set"
    return code(decided[0]) if len(set(decided)) == 1 else "by preset"


def decided_as(key: Key) -> str:
    """The name of an algorithm's key in `ResolvedAlgorithm`."""
    name = "_".join(key.path[1:]) if key.path[0] == "algorithm" else ""
    return RESOLVED_NAMES.get(name, name)


def code(value: object) -> str:
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def meaning(key: Key) -> str:
    """What the schema says of the key: the text under it, else, for a section, its class's; else ours."""
    said = schema_meanings().get(dotted(key.path)) or MEANINGS.get(dotted(key.path))
    assert said, f"nobody says what `{dotted(key.path)}` means"
    return said.replace("None: ", "Not set: ")


def schema_meanings() -> dict[str, str]:
    classes = {node.name: node for node in ast.parse(inspect.getsource(schema)).body if isinstance(node, ast.ClassDef)}
    found = {}
    for key in all_keys().values():
        for owner in owners(key):
            if said := texts_under_keys(classes[owner.__name__]).get(key.path[-1]):
                found[dotted(key.path)] = said
                break
        else:
            if key.section is not None and (said := ast.get_docstring(classes[key.section.__name__])):
                found[dotted(key.path)] = one_line(said)
    return found


def owners(key: Key) -> Iterator[type[Section]]:
    """The section that the key belongs to, and those that it inherits from."""
    section = Recipe if len(key.path) == 1 else all_keys()[key.path[:-1]].section
    if section is None:  # a section with a name of the user's choice
        return
    for owner in section.__mro__:
        if owner is Section:
            return
        yield owner


def texts_under_keys(node: ast.ClassDef) -> dict[str, str]:
    texts = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    texts[statement.target.id] = one_line(text)
    return texts


# --- algorithms


def preset_table() -> str:
    rows = [
        "| `algorithm.name` | advantage | loss | aggregation | clip | besides |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, preset in PRESETS.items():
        resolved = resolve_algorithm(recipe_with(name))
        clip = f"{resolved.clip_low:g}, {resolved.clip_high:g}" if resolved.loss in CLIPS else ""
        besides = []
        if preset.kl_where:
            estimator, coefficient = resolved.kl_estimator, resolved.kl_coefficient
            besides.append(f"KL in the {preset.kl_where} ({estimator}, {coefficient:g}), so a reference model")
        besides += ["a critic"] * resolved.needs_critic
        besides += ["a greedy answer to each prompt"] * resolved.needs_greedy_baseline
        besides += ["dynamic sampling"] * resolved.dynamic_sampling
        parts = f"{resolved.advantage} | {resolved.loss} | {resolved.aggregation}"
        rows.append(f"| `{name}` | {parts} | {clip} | {'; '.join(besides)} |")
    return "\n".join(rows)


def recipe_with(algorithm: str) -> Recipe:
    return Recipe.model_validate(
        {"name": "x", "model": {"path": "x"}, "data": {"train": {"path": "x"}}, "algorithm": {"name": algorithm}}
    )


def loss_table() -> str:
    rows = ["| loss | what it is | clip | aggregation |", "| --- | --- | --- | --- |"]
    for name in get_args(schema.LossName):
        low, high = CLIPS.get(name, (None, None))
        clip = "none" if low is None else f"{low:g} below, {high:g} above"
        rows.append(f"| `{name}` | {LOSSES[name]} | {clip} | {FORCED_AGGREGATION.get(name, 'any')} |")
    return "\n".join(rows)


def word_table(what: str, words: dict[str, str]) -> str:
    return "\n".join(
        [f"| {what} | what it is |", "| --- | --- |", *(f"| `{name}` | {said} |" for name, said in words.items())]
    )


def one_line(text: str) -> str:
    return " ".join(text.split())


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
