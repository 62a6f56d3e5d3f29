"""What a real bash passes to commands: scripts run with commands that write down their words and do nothing else.

One bash runs many scripts, each in a subshell of its own. There is no program in its PATH but a few that take texts
apart, so that a script reaches neither the network nor anything outside its folder by the names of commands.
"""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from deadlines import within

HARMLESS = ("dirname", "basename", "realpath", "readlink", "seq", "env")
RUN = r"""
export PATH=$1 HOME='~' LC_ALL=C
exec 9>"$2"
shift 2
unset OLDPWD
date() { :; }
command_not_found_handle() {
    case "$*" in
        *torch_npu* | *npu-smi*) return 1 ;;
        "tee "*) while read -r; do :; done ;;  # else what is piped to it would end with an error
    esac
    printf '%s\0' "$#" "$@" >&9
}
for each in "$@"; do
    printf 'script\0' >&9
    # a loop that waits for a server would never end
    ( ulimit -t 2; BASH_ARGV0=$each; set --; . "$each" ) </dev/null >/dev/null 2>&1
done
"""


def run_in_bash(
    scripts: Sequence[Path], folder: Path, variables: Mapping[str, str] | None = None
) -> list[list[list[str]]]:
    """The commands that each script runs, as lists of words, in `folder`, with `variables` in the environment."""
    bash, tools, record = shutil.which("bash"), folder / "tools", folder / "record"
    assert bash is not None
    tools.mkdir(exist_ok=True)
    for name in HARMLESS:
        if not (tools / name).exists():
            (tools / name).symlink_to(shutil.which(name) or "/bin/false")
    work = folder / "work"
    work.mkdir(exist_ok=True)
    command = [bash, "--norc", "-c", RUN, "oracle", str(tools), str(record), *map(str, scripts)]
    nothing, limit_s = subprocess.DEVNULL, within(600)
    subprocess.run(command, cwd=work, env={**(variables or {})}, stdin=nothing, timeout=limit_s, check=False)
    fields = record.read_bytes().decode(errors="replace").split("\0")[:-1]
    found: list[list[list[str]]] = []
    at = 0
    while at < len(fields):
        if fields[at] == "script":
            found.append([])
            at += 1
        else:
            end = at + 1 + int(fields[at])
            found[-1].append(fields[at + 1 : end])
            at = end
    return found
