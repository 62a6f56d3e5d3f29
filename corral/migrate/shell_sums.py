"""Whole numbers in `$((...))`, as the shell works them out: + - * / % and small powers."""

import re
from collections.abc import Callable

TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]{1,15}|[0-9]{1,18})(?![\w#])|([A-Za-z_][A-Za-z0-9_]*)|(\*\*|\+(?!\+)|-(?!-)|[*/%()]))"
)
CHANGED = re.compile(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)|\b([A-Za-z_]\w*)(?:\[[^]]{0,100}\])?\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))",
    re.ASCII,
)
STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2, "**": 3}
LONGEST = 1000
"""Characters of a sum."""
LARGEST = 10**18
LARGEST_POWER = 64


def worked_out(expression: str, lookup: Callable[[str], str | None]) -> int | None:
    """None: it is more than this knows. `lookup`: a variable's text, None where it is not known."""
    try:
        sum_ = _Sum(expression.strip(), lookup)
        result = sum_.value(0)
        return result if sum_.next is None else None
    except (ValueError, ArithmeticError, RecursionError):
        return None


def changed_names(expression: str) -> set[str]:
    """Variables that a sum sets: `A++`, `A=3`."""
    return {before or behind for before, behind in CHANGED.findall(expression)}


class _Sum:
    def __init__(self, text: str, lookup: Callable[[str], str | None]) -> None:
        if len(text) > LONGEST:
            raise ValueError("too long")
        self.text, self.lookup, self.at = text, lookup, 0
        self.next: str | None = None
        self._move()

    def _move(self) -> None:
        match = TOKEN.match(self.text, self.at)
        if match is None and self.at < len(self.text):
            raise ValueError(f"what `{self.text[self.at :]}` means is not known")
        self.next, self.at = (match[0].strip(), match.end()) if match else (None, self.at)

    def value(self, weakest: int) -> int:
        """With the operators behind it that bind stronger than `weakest`."""
        left = self._number()
        while self.next in STRENGTH and (strength := STRENGTH[self.next]) > weakest:
            operator = self.next
            self._move()
            left = calculated(left, operator, self.value(strength - (operator == "**")))  # powers from the right
        return left

    def _number(self) -> int:
        token = self.next
        if token is None:
            raise ValueError("it ends too early")
        self._move()
        if token in ("-", "+"):
            return -self._number() if token == "-" else self._number()
        if token == "(":
            inside = self.value(0)
            if self.next != ")":
                raise ValueError("a bracket is not closed")
            self._move()
            return inside
        return written_number(self.lookup(token) if re.match(r"[A-Za-z_]", token) else token)


def written_number(text: str | None) -> int:
    match = re.fullmatch(r"\s*([-+]?)(0[xX][0-9a-fA-F]{1,15}|0[0-7]{0,18}|[1-9][0-9]{0,17})?\s*", text or "0")
    if text is None or match is None or (match[1] and not match[2]):
        raise ValueError("not a whole number")
    digits = match[2] or "0"
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits[0] == "0" else 10
    return int(match[1] + digits, base)


def calculated(left: int, operator: str, right: int) -> int:
    """Division goes towards 0, and the remainder with it; not as in Python."""
    if operator == "+":
        result = left + right
    elif operator == "-":
        result = left - right
    elif operator == "*":
        result = left * right
    elif operator == "**":
        if not 0 <= right <= LARGEST_POWER:
            raise ValueError("too large a power")
        result = left**right
    else:
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        result = quotient if operator == "/" else left - quotient * right
    if abs(result) >= LARGEST:
        raise ValueError("too large")
    return result
