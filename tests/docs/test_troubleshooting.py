"""The page of symptoms quotes messages as Corral prints them."""

import re

from guides import ROOT, messages

NOT_LITERAL = {
    "... is not a key; did you mean ...",
    "model.path: ... could not be loaded: ...",
    "a sample failed: ...",
    "was killed by signal 9 (SIGKILL; often out of memory, ended by the kernel or by Ray)",
    "NCCL ... unhandled system error",
}
"""Messages that are put together from parts in several files, and the last one, which is NCCL's."""


def test_quoted_messages_are_in_the_code() -> None:
    cells = re.findall(r"^\| (.*?) \| ", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [match[1] or match[2] for cell in cells for match in re.finditer(r"`` (.+?) ``|`([^`]{20,})`", cell)]
    assert len(quoted) > 70
    missing = [
        message
        for message in quoted
        if message not in NOT_LITERAL
        and not any(all(part in source for part in message.split("...")) for source in messages())
    ]
    assert not missing, "\n".join(missing)
