"""Arithmetic with whole numbers, as the shell does it in `$((...))`."""

import operator
import re
from collections.abc import Callable

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]{1,15}(?![\w#])|[0-9]{1,18}(?![\w#])|[A-Za-z_][A-Za-z0-9_]*(?![\w\[])"
    r"|\*\*|\+\+|--|<<=|>>=|<<|>>|[<>=!*/%+&|^-]=|&&|\|\||[-+*/%<>=!~&|^?:(),])"
)
CHANGED = re.compile(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)|\b([A-Za-z_]\w*)(?:\[[^]]{0,100}\])?\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))",
    re.ASCII,
)
STRENGTH = {
    sign: strength
    for strength, signs in enumerate(
        ("||", "&&", "|", "^", "&", "== !=", "< > <= >=", "<< >>", "+ -", "* / %", "**"), start=1
    )
    for sign in signs.split()
}
MAX_EXPRESSION = 1000
"""Characters of a sum."""
LARGEST = 10**18
LARGEST_POWER = 64
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "**": operator.pow,
    "<<": operator.lshift,
    ">>": operator.rshift,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "&&": lambda left, right: int(bool(left) and bool(right)),
    "||": lambda left, right: int(bool(left) or bool(right)),
}


def evaluate_arithmetic(expression: str, lookup: Callable[[str], str | None]) -> tuple[int, dict[str, int]] | None:
    """The result and the variables that are set. None: it is more than this knows. `lookup` gives a variable's text."""
    try:
        reader = _ArithmeticReader(expression.strip(), lookup)
        result = reader.value(0) if reader.next is not None else 0
        return (result, reader.changed) if reader.next is None else None
    except (ValueError, ArithmeticError, RecursionError):
        return None


def assigned_names(expression: str) -> set[str]:
    """Variables that a sum sets: `A++`, `A=3`."""
    return {before or behind for before, behind in CHANGED.findall(expression)}


class _ArithmeticReader:
    def __init__(self, text: str, lookup: Callable[[str], str | None]) -> None:
        if len(text) > MAX_EXPRESSION:
            raise ValueError("too long")
        self.text, self.lookup, self.at = text, lookup, 0
        self.changed: dict[str, int] = {}
        self.num_skipped = 0
        """How many conditions around say that what is read is not computed."""
        self.next: str | None = None
        self._move()

    def _move(self) -> None:
        match = TOKEN.match(self.text, self.at)
        if match is None and self.text[self.at :].strip():
            raise ValueError(f"what `{self.text[self.at :]}` means is not known")
        self.next, self.at = (match[1], match.end()) if match else (None, len(self.text))

    def value(self, weakest: int) -> int:
        """The next number with the operators behind it that bind stronger than `weakest`."""
        left = self._number()
        while self.next in STRENGTH and (strength := STRENGTH[self.next]) > weakest:
            sign = self.next
            self._move()
            skips = (sign == "&&" and not left) or (sign == "||" and bool(left))
            right = self._part(skips, strength - (sign == "**"))  # powers from the right
            left = 0 if self.num_skipped else apply_operator(left, sign, right)
        if self.next == "?" and not weakest:
            self._move()
            then = self._part(not left, 0)
            self._expect(":")
            otherwise = self._part(bool(left), 0)
            left = then if left else otherwise
        return left

    def _part(self, skips: bool, weakest: int) -> int:
        self.num_skipped += skips
        value = self.value(weakest)
        self.num_skipped -= skips
        return value

    def _expect(self, token: str) -> None:
        if self.next != token:
            raise ValueError(f"a {token} is missing")
        self._move()

    def _number(self) -> int:
        token = self.next
        if token is None:
            raise ValueError("it ends too early")
        self._move()
        if token in ("++", "--") and self.next and NAME.fullmatch(self.next):
            name = self.next
            self._move()
            return self._set(name, self._look_up(name) + (1 if token == "++" else -1))
        if token in ("-", "+", "!", "~"):
            number = self._number()
            return {"-": -number, "+": number, "!": int(not number), "~": ~number}[token]
        if token == "(":
            inside = self.value(0)
            self._expect(")")
            return inside
        if not NAME.fullmatch(token):
            return parse_number(token)
        sign = self.next or ""
        if sign in ("++", "--"):
            self._move()
            number = self._look_up(token)
            self._set(token, number + (1 if sign == "++" else -1))
            return number
        if sign == "=" or (sign[:-1] in STRENGTH and sign[-1] == "=" and sign not in STRENGTH):
            self._move()
            right = self.value(0)
            return self._set(token, right if sign == "=" else apply_operator(self._look_up(token), sign[:-1], right))
        return self._look_up(token)

    def _look_up(self, name: str) -> int:
        return self.changed[name] if name in self.changed else parse_number(self.lookup(name))

    def _set(self, name: str, number: int) -> int:
        if not self.num_skipped:
            self.changed[name] = number
        return number


def parse_number(text: str | None) -> int:
    match = re.fullmatch(r"\s*([-+]?)(0[xX][0-9a-fA-F]{1,15}|0[0-7]{0,18}|[1-9][0-9]{0,17})?\s*", text or "0")
    if text is None or match is None or (match[1] and not match[2]):
        raise ValueError("not a whole number")
    digits = match[2] or "0"
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits[0] == "0" else 10
    return int(match[1] + digits, base)


def apply_operator(left: int, sign: str, right: int) -> int:
    """Division goes towards 0, and the remainder with it; not as in Python."""
    if sign in ("**", "<<", ">>") and not 0 <= right < LARGEST_POWER:
        raise ValueError("too large a power")
    if sign in "/%":
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        result = quotient if sign == "/" else left - quotient * right
    else:
        result = int(OPERATIONS[sign](left, right))
    if abs(result) >= LARGEST:
        raise ValueError("too large")
    return result
