"""Values on a Hydra command line: texts, numbers, `[a,b]`, `{a:1}`, quotes, and `${...}`, which stays as it is."""

from typing import Any

from corral.recipe.document import plain_scalar
from corral.recipe.errors import RecipeError

ESCAPED = "\\,[]{}:='\" \t"
MAX_DEPTH = 40


def read_value(written: str) -> Any:
    """Raises a RecipeError where brackets or quotes are left open."""
    text = written.strip()
    if text[:1] not in ("[", "{", "'", '"'):
        return plain_scalar(unescaped(text)) if text else ""
    reader = _ValueReader(text)
    value = reader.value(0)
    if reader.at < len(text):
        if text[0] in "'\"":
            return written
        raise RecipeError("there is more behind the closing bracket")
    return value


def unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    found, at = "", 0
    while at < len(text):
        at += text[at] == "\\" and text[at + 1 : at + 2] in ESCAPED and at + 1 < len(text)
        found += text[at]
        at += 1
    return found


class _ValueReader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise RecipeError("is nested too deeply")
        self._spaces()
        match self._next():
            case "[":
                return [item for _, item in self._items("]", depth)]
            case "{":
                return dict(self._items("}", depth))
            case "'" | '"' as quote:
                return self._quoted(quote)
        text = self._until(",]}")
        return plain_scalar(unescaped(text.strip()))

    def _items(self, closing: str, depth: int) -> list[tuple[str, Any]]:
        self.at += 1
        items: list[tuple[str, Any]] = []
        self._spaces()
        while self._next() != closing:
            key = ""
            if closing == "}":
                key = str(self._key())
            items.append((key, self.value(depth + 1)))
            self._spaces()
            if self._next() == ",":
                self.at += 1
                self._spaces()
            elif self._next() != closing:
                raise RecipeError(f"a {closing} is missing")
        self.at += 1
        return items

    def _key(self) -> str:
        self._spaces()
        key = self._quoted(quote) if (quote := self._next()) in ("'", '"') else self._until(":,]}").strip()
        self._spaces()
        if self._next() != ":":
            raise RecipeError("a : is missing")
        self.at += 1
        return key

    def _quoted(self, quote: str) -> str:
        start = self.at + 1
        end = start
        while end < len(self.text) and self.text[end] != quote:
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise RecipeError(f"a {quote} is not closed")
        self.at = end + 1
        return self.text[start:end].replace(f"\\{quote}", quote).replace("\\\\", "\\")

    def _until(self, ends: str) -> str:
        """Up to one of these that is not inside `${...}`."""
        start, depth = self.at, 0
        while self.at < len(self.text) and (depth or self.text[self.at] not in ends):
            if self.text.startswith("${", self.at):
                depth += 1
                self.at += 1
            elif self.text[self.at] == "}":
                depth -= 1
            elif self.text[self.at] == "\\":
                self.at += 1
            self.at += 1
        return self.text[start : self.at]

    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def _spaces(self) -> None:
        while self._next().isspace():
            self.at += 1
