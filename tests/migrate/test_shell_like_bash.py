"""The reader of shell scripts against a real bash: what it gives without a warning must be what bash passes."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from bash_oracle import run_in_bash
from deadlines import within
from example_scripts import SCRIPTS, SETTINGS
from random_scripts import RandomScript

from corral.migrate.shell import ShellScript, read_script
from corral.recipe.errors import RecipeError

SNIPPETS = [
    # words
    "train -m x \\\n    a=1 \\\n    b=2\n",
    """train 'a b' "c  d" e\\ f trainer.logger=['console','wandb'] "it's" """,
    'ARGS="a=1 b=2"\ntrain $ARGS "$ARGS"',
    'DATA=(\n  data.x=1  # why\n  "data.y=a b"\n)\nDATA+=(z=3)\ntrain "${DATA[@]}" "$@"',
    "F='x y'; train a=$F $F \"a=$F\" 'a=$F'",
    "F=' x '; train a${F}b $F\"q\" $F",
    'train "" \'\' "$A" $A a"$A"b',
    'X=(1 \'2 3\'); train "${X[@]}" "${X[*]}" ${X[@]} ${X[*]} $X',
    'X=(1 2 3); train "pre${X[@]}post" a="${X[*]}" b=${X[@]}',
    'X=(); train "${X[@]}" "a${X[@]}" ${X[*]}',
    'X=(a); X+=(b c); Y=("${X[@]}" d); train "${Y[@]}" ${#Y[@]} ${Y[1]} ${Y[-1]}',
    'X=(1 2); IFS=,; train "a=[${X[*]}]"',
    "IFS=$'\\n\\t'; A='x y'; train $A",
    "train $'it\\'s' $'a\\tb' $'\\x41' $\"y\"",
    'train "a\\"b" "a\\\\b" "a\\yb" a\\yb "\\$A" a\\ b',
    "train a=1 `# b=2` c=3",
    'A="x\\\ny"; train $A',
    "train a#b c # d",
    "train \"a=\\${x.y}\" 'b=${x.y}'",
    # variables
    "DIR='data/nq'\nexport N=2\ntrain $DIR/x.parquet n=${N} ${N}x$N",
    "PYTHONUNBUFFERED=1 HYDRA=2 train a=1",
    "A=1 B=$A; train $A $B",
    "FOO=7; FOO=1 train a=$FOO; train b=$FOO",
    "A=1; export A B=1024 C=$A; train $A $B $C",
    "A=1; export A=2 B=$A; train $A $B",
    'A=1; export "B=$A x"; train "$B"',
    "A=3; A+=4; train $A",
    "A=1; (A=2; train in=$A); train out=$A",
    'X=(a); (X+=(b); (X+=(c); train "${X[@]}"); train "${X[@]}"); X+=(d); train "${X[@]}"',
    "A=1; ( (A=2); B=3 ); train $A ${B-none}",
    "A=1; unset A; train ${A:-2}",
    'set -- a \'b c\'; train "$@" $1 "$2" $# ${3:-none} "${@:2}"; shift; train "$@" $#',
    "function f() { :; }; g() { :; }; h () ( : ); function k { :; }; A=1; train $A",
    "A=x; case $A in y|z) ;; (w) ;; esac; train $A",
    "A=5; [[ $A =~ ^(5|6)$ ]]; [[ $A == 5 && 1 < 2 ]]; train $A",
    # defaults and patterns
    "B=given; train ${A:-1} ${B:-${C:-deep}} ${D-x}",
    "A=; train a${A-5} b${A:-5} c${A+x} d${A:+x} e${B-5} f${B+x}",
    "train ${B:=y} $B; : ${C:=z}; train $B $C",
    'train ${B:-\'q\'}/x ${B:-a\\ b} ${B:-"a b"} ${B:-a b} "${B:-\'q\'}" "${B:-"x y"}"',
    'X=(\'a b\' c); train ${X[@]+"${X[@]}"} ${Y[@]+"${Y[@]}"}',
    'A=v; train ${A:+k=$A} ${B:+k=$B} "${B:+k}"',
    "A=${B:-${C:-deep}}; train $A ${B:-{x}}",
    "A=/x/y/z.tar.gz; train ${A##*/} ${A#*/} ${A%.gz} ${A%%.*} ${A%.*} ${A%/*} ${A#/x}",
    "A=/x/y/z.tar.gz; train ${A%nothing} a${A##/x*} b${A%%*gz} ${A#*} c${A##*} ${A#*none}",
    'A=a*b*c; train "${A%\'*\'*}" "${A#"a*"}"',
    'A=data.parquet; S=.parquet; train ${A%$S} "${A%"$S"}" ${#A}',
    # sums
    "N=4\ntrain $((1024 * N)) $(( $N / 3 )) $((2-(1)))",
    "A=5; train $((A*2)) $(( $A / 2 )) $((A%3)) $((-7/2)) $((-7%3)) $((7/-2)) $((7%-3))",
    "train $((2**3)) $((2**3**2)) $((-2**2)) $((010)) $((0x10)) $((2-(1)-1)) $[3*4] $((+3))",
    "A=; train $((A+1)) $((1 + 2 * 3 - 4)) $((100/7/2)) $((2*-3))",
    # ends of brackets
    'A=$(: ")" x); train c',
    "A=$(: ')' # it's (\n); train c",
    "A=$(: <<EOF\nit's (\nEOF\n); train c",
    'A=${B:-"}"}; train $A',
    'A=`: "a\'b" \\`:\\``; train c',
    "A=${B//\\'/}; train c",
    'A="$(: "$(: ")")")"; train c',
    "A=$((1<<3)); train c",
    # what is not a word
    "# first\ntrain a=1 2>&1 > log.txt < /dev/null # x=2",
    "cat <<EOF\ntrain x=1\nEOF\ntrain y=1",
    ": <<EOF\nit's \" (\nEOF\ntrain a",
    ": <<-'EOF'\n\tit's\n\tEOF\ntrain a",
    ": <<A <<B; train a\nx\nA\ny\nB",
    "train a 2>&1 >/dev/stdout b",
    "for ((i=0; i<3; i++)); do :; done; train a",
    "if ((2 > 1)); then :; fi; A=1; train $A",
    "train a \\\n  # b \\\n",
    "train a \\\n\n",
]


PROGRAMS = ("train", "python", "python3", "uv", "ray", "srun", "torchrun", "nohup", "docker")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


def passed_and_read(
    texts: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[str, list[list[str]], ShellScript | None]]:
    """Scripts, the commands that bash runs, and the script as it was read; None where it was refused."""
    scripts = [folder / f"script{number}.sh" for number in range(len(texts))]
    for script, text in zip(scripts, texts, strict=True):
        script.write_text(text)
    for script, text, passed in zip(scripts, texts, run_in_bash(scripts, folder, variables), strict=True):
        try:
            yield text, passed, read_script(text, str(script), variables, str(folder / "work"))
        except RecipeError:
            yield text, passed, None


def trainings(script: ShellScript) -> list[list[str]]:
    return [command.texts for command in script.commands if command.texts[0] in PROGRAMS]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_words_are_those_of_bash(snippet: str, tmp_path: Path) -> None:
    [(_, passed, script)] = passed_and_read([snippet], tmp_path)
    assert script is not None
    assert trainings(script) == [words for words in passed if words[0] == "train"]
    assert all(word.unknown is None for command in script.commands for word in command.words)


def test_a_backslash_at_the_end_of_a_script_keeps_its_command(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("printf '%s|' a=1 \\\n  b=2 \\")
    ran = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=within(20))
    [command] = read_script(script.read_text(), str(script)).commands
    assert ran.stdout == "a=1|b=2|"
    assert command.texts[2:] == ["a=1", "b=2"]


@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_scripts_as_published_give_the_words_of_bash_for_any_variables(number: int, tmp_path: Path) -> None:
    """Thirty scripts with ten settings."""
    variables, num_equal = SETTINGS[number], 0
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    for text, passed, script in passed_and_read(SCRIPTS, folder, variables):
        assert script is not None
        assert trainings(script) == [words for words in passed if words[0] in PROGRAMS], (variables, text)
        num_equal += 1
    assert num_equal == 30


def check_random_scripts(seeds: range, folder: Path) -> None:
    """What is read equals what bash passes, one way or, where a branch is open, another; or it is refused in words."""
    num_refused = 0
    for text, passed, script in passed_and_read([RandomScript(seed).text() for seed in seeds], folder):
        words = [one for one in passed if one[0] == "train"]
        if script is None or any(word.unknown is not None for one in script.commands for word in one.words):
            num_refused += 1
            continue
        ways = [trainings(one) for one in (script, *(way for _, way in script.other_ways))]
        assert words in ways, f"{text}\nbash: {words}\nread: {ways[0]}"
    assert num_refused <= 0.05 * len(seeds)


@pytest.mark.slow
def test_random_scripts_give_the_words_of_bash(tmp_path: Path) -> None:
    check_random_scripts(range(200), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 10_000, 1000))
def test_ten_thousand_random_scripts_give_the_words_of_bash(start: int, tmp_path: Path) -> None:
    check_random_scripts(range(start, start + 1000), tmp_path)
