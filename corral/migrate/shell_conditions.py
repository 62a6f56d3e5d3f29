"""What `[ ... ]` and `[[ ... ]]` decide, as far as the text of a script decides it."""

import re
from collections.abc import Callable, Sequence

from corral.migrate.shell_arithmetic import OPERATIONS
from corral.migrate.shell_expansion import MAX_COMPARED, NAME, ShellScope, ShellValue, glob_pattern
from corral.migrate.shell_lexer import LiteralPart, ShellWord

NUMERIC = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
BINARY = {*NUMERIC, "=", "==", "!=", "=~", "<", ">", "-nt", "-ot", "-ef"}
INTEGER = re.compile(r"\s*[-+]?[0-9]{1,18}\s*")
REGEX = re.compile(r"(?!.*\[[:.=])(?!.*\)[*+?{])[\w .^$*+?|()\[\]/=@%~,:-]*")
"""Regular expressions that mean the same in Python, and end soon."""
MAX_REPEATS = 4
TestItem = str | ShellWord | ShellValue
"""A part of a condition: an operator, a word as it is written, or one whose value is put in."""


class Condition:
    def __init__(self, scope: ShellScope, items: Sequence[TestItem], double: bool) -> None:
        self.scope, self.items, self.double, self.at = scope, items, double, 0
        """`double`: it is `[[ ... ]]`, where words are not split, and may be patterns."""

    def result(self) -> bool | None:
        """None: only running the script would show."""
        if not self.items:
            return False
        found = self._joined(("||", "-o"), lambda: self._joined(("&&", "-a"), self._one))
        return found if self.at == len(self.items) else None if self.double else False  # bash complains, and goes on

    def _text(self, ahead: int = 0) -> str | None:
        """The next item where it may be an operator, and None where there is no item."""
        if self.at + ahead >= len(self.items):
            return None
        item = self.items[self.at + ahead]
        return item if isinstance(item, str) else item.keyword if isinstance(item, ShellWord) else item.text

    def _next(self) -> TestItem:
        self.at += 1
        return self.items[self.at - 1]

    def _joined(self, signs: tuple[str, str], read: Callable[[], bool | None]) -> bool | None:
        found, sign = read(), signs[0] if self.double else signs[1]
        decisive = sign in ("||", "-o")
        while self._text() == sign and self.at + 1 < len(self.items):
            self.at += 1
            other = read()
            found = decisive if decisive in (found, other) else None if None in (found, other) else not decisive
        return found

    def _one(self) -> bool | None:
        text, behind = self._text(), self._text(1)
        if text is None:
            return False
        if behind in BINARY and self._text(2) is not None and (self.double or text not in ("(", "!")):
            left, sign, right = self._next(), str(self._text()), self.items[self.at + 1]
            self.at += 2
            return self._compared(left, sign, right)
        if text == "!" and behind is not None:
            self.at += 1
            found = self._one()
            return None if found is None else not found
        if text == "(" and behind is not None:
            self.at += 1
            found = self._joined(("||", "-o"), lambda: self._joined(("&&", "-a"), self._one))
            self.at += 1
            return found
        if re.fullmatch("-[a-zA-Z]", text) and behind is not None:
            self.at += 1
            return self._unary(text, self._value(self._next()))
        return self._unary("-n", self._value(self._next()))

    def _value(self, item: TestItem) -> ShellValue:
        if isinstance(item, ShellWord):
            return self.scope.joined(item)
        return ShellValue(item) if isinstance(item, str) else item

    def _unary(self, sign: str, value: ShellValue) -> bool | None:
        if sign == "-v" and NAME.fullmatch(value.text):
            return value.text in self.scope.values
        if value.unknown is not None or sign not in ("-z", "-n"):
            return None
        return (value.text == "") == (sign == "-z")

    def _compared(self, left: TestItem, sign: str, right: TestItem) -> bool | None:
        first, second = self._value(left), self._value(right)
        if sign == "=~":
            self.scope.forget("BASH_REMATCH", "=~")
        if first.unknown is not None or second.unknown is not None:
            return None
        if sign in NUMERIC:
            numbers = [self._number(first.text), self._number(second.text)]
            if None in numbers:
                return None if self.double else False
            return bool(OPERATIONS[NUMERIC[sign]](*numbers))  # type: ignore[arg-type]
        if sign == "=~":
            return self._matches(first.text, right)
        if sign not in ("=", "==", "!="):
            return None
        if not isinstance(right, ShellWord):
            return (first.text == second.text) == (sign != "!=")
        pattern = glob_pattern(self.scope.patterns(right))
        if pattern is None or len(first.text) > MAX_COMPARED:
            return None
        return (re.fullmatch(pattern, first.text, re.DOTALL) is not None) == (sign != "!=")

    def _number(self, text: str) -> int | None:
        if not self.double:
            return int(text) if INTEGER.fullmatch(text) else None
        value = self.scope.calculate(ShellWord((LiteralPart(text, quoted=True),), 0))
        return int(value.text) if value.unknown is None else None

    def _matches(self, text: str, regex: TestItem) -> bool | None:
        if not isinstance(regex, ShellWord):
            return None
        pieces = self.scope.patterns(regex)
        if not all(not splits or REGEX.fullmatch(value.text) for value, splits, _ in pieces):
            return None
        pattern = "".join(value.text if splits else re.escape(value.text) for value, splits, _ in pieces)
        if len(re.findall(r"[*+?]", pattern)) > MAX_REPEATS or len(text) > MAX_COMPARED:
            return None
        try:
            return re.search(pattern, text) is not None
        except re.error:
            return None
