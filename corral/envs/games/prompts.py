"""What a game says to the model, apart from the game. Every text can be replaced by the recipe's `options.prompts`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from corral.data.plugins import did_you_mean
from corral.recipe.errors import UserError

PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
PLACEHOLDERS = (
    "instruction",
    "symbols",
    "actions",
    "format",
    "turn",
    "observation",
    "actions_left",
    "max_response_tokens",
)


@dataclass(frozen=True)
class Prompts:
    """Templates. Each may have any of the placeholders; `{format}` is an example of a reply. A line with `{symbols}` is
    left out where a game has none."""

    instruction: str = "Play this game."
    """What the game is, and what to do in it. A game has its own."""
    system: str | None = "You play games. Choose every action so that the sum of your rewards is as large as possible."
    """None: there is no system message."""
    opening: str = (
        "{instruction}\n"
        "Symbols: {symbols}\n"
        "Actions: {actions}\n"
        "Reply with one action, like this: {format}\n"
        "\n"
        "Turn {turn}, actions left: {actions_left}\n"
        "{observation}"
    )
    """The first message, with the first observation."""
    turn: str = "Turn {turn}, actions left: {actions_left}\n{observation}"
    """Every later message."""

    def __post_init__(self) -> None:
        for name, template in vars(self).items():
            for word in PLACEHOLDER.findall(template or ""):
                if word not in PLACEHOLDERS:
                    raise UserError(
                        f"prompts.{name}: there is no placeholder {{{word}}}{did_you_mean(word, PLACEHOLDERS)}; "
                        f"there are {', '.join(PLACEHOLDERS)}"
                    )

    def changed(self, texts: Mapping[str, str | None]) -> "Prompts":
        """With the texts that a recipe gives instead."""
        known = [field.name for field in fields(self)]
        for name, text in texts.items():
            if name not in known:
                raise UserError(f"prompts: no text is called `{name}`{did_you_mean(name, known)}")
            if not isinstance(text, str) and not (name == "system" and text is None):
                raise UserError(f"prompts.{name} must be text, not {text!r}")
        return replace(self, **texts)  # type: ignore[arg-type]


def fill(template: str, values: Mapping[str, object]) -> str:
    """Not str.format: templates may be full of other braces. Values are not looked into."""
    return PLACEHOLDER.sub(lambda found: str(values[found[1]]), template)
