"""Where the quotes and brackets of a shell script end, without reading what is in them."""

import re

SPECIAL = re.compile(r"\\.|\$'|\$\(\(|\$\(|\$\{|<<<|<<|['\"`()}\]#\n]", re.DOTALL)
CLOSING = {"$((": "))", "$(": ")", "${": "}", '"': '"'}
SINGLE = re.compile(r"[^']*'")
ESCAPED = {
    "`": re.compile(r"[^`\\]*(?:\\.[^`\\]*)*`", re.DOTALL),
    "$'": re.compile(r"[^'\\]*(?:\\.[^'\\]*)*'", re.DOTALL),
}
HERE = re.compile(r"-?[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s;&|<>()'\"]+))")
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|([0-7]{1,3})|(.))", re.DOTALL)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}
DEEPEST = 20


def end_of(text: str, at: int, opening: str, closing: str, depth: int = 0) -> int:
    """The place behind `closing`, for a bracket or quote whose inside begins at `at`. ValueError: it has no end."""
    if depth > DEEPEST:
        raise ValueError("is nested too deeply")
    num_open, is_command = len(closing), closing == ")"
    here: list[str] = []
    while match := SPECIAL.search(text, at):
        at, found = match.end(), match[0]
        if found == closing[0]:
            num_open -= 1
            if not num_open:
                return at
        elif found == "`" or (found == "$'" and closing != '"'):
            at = end_of_quote(text, at, found)
        elif found in CLOSING:
            at = end_of(text, at, found, CLOSING[found], depth + 1)
        elif closing == '"':
            continue
        elif found == "'":
            at = end_of_quote(text, at, found)
        elif found == "(" and closing[0] == ")":
            num_open += 1
        elif found == "#" and is_command and text[match.start() - 1] in " \t\n;(&|":
            at = end_of_line(text, at)
        elif found == "<<" and is_command and (word := HERE.match(text, at)):
            at = word.end()
            here.append(next(one for one in word.groups() if one is not None))
        elif found == "\n":
            for word_at_end in here:
                at = end_of_here_text(text, at, word_at_end)
            here = []
    raise ValueError(f"a {opening} is not closed")


def end_of_quote(text: str, at: int, quote: str) -> int:
    """Of a single quote, `$'` or a backquote, whose inside begins at `at`."""
    match = ESCAPED.get(quote, SINGLE).match(text, at)
    if match is None:
        raise ValueError(f"a {quote} is not closed")
    return match.end()


def end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def end_of_here_text(text: str, at: int, word: str) -> int:
    """Behind the line that is `word` alone; the end of the script where there is none, as for the shell."""
    match = re.compile(rf"^\t*{re.escape(word)}$\n?", re.MULTILINE).search(text, at)
    return match.end() if match else len(text)


def unescaped(text: str) -> str:
    """The inside of `$'...'`."""

    def character(match: "re.Match[str]") -> str:
        if match[4] is not None:
            return ESCAPES.get(match[4], match[4] if match[4] in "\\'\"?" else match[0])
        code = int(match[1] or match[2] or match[3], 8 if match[3] else 16)
        is_character = 0 < code < (0xD800 if match[2] else 0x80)  # above: a byte of several, or no character
        return chr(code) if is_character else match[0]

    return ESCAPE.sub(character, text)
