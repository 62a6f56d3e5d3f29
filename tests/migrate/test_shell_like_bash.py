"""The reader of shell scripts against a real bash: what it gives without a warning must be what bash passes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from corral.migrate.shell import read_script

BASH = shutil.which("bash")
TRAIN = 'train() { (($#)) && printf "%s\\0" "$@"; }\n'
"""Stands for a training: it prints its words."""

SNIPPETS = [
    # words
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
    ": <<EOF\nit's \" (\nEOF\ntrain a",
    ": <<-'EOF'\n\tit's\n\tEOF\ntrain a",
    ": <<A <<B; train a\nx\nA\ny\nB",
    "train a 2>&1 >/dev/stdout b",
    "for ((i=0; i<3; i++)); do :; done; train a",
    "if ((2 > 1)); then :; fi; A=1; train $A",
    "train a \\\n  # b \\\n",
    "train a \\\n\n",
]


@pytest.mark.skipif(BASH is None, reason="there is no bash")
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_words_are_those_of_bash(snippet: str, tmp_path: Path) -> None:
    assert BASH is not None
    ran = subprocess.run(
        [BASH, "--norc", "-c", TRAIN + snippet],
        cwd=tmp_path,
        env={"HOME": "~"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=20,
    )
    passed = ran.stdout.split("\0")[:-1]
    read = [command for command in read_script(snippet, "run.sh").commands if command.texts[0] == "train"]
    assert [text for command in read for text in command.texts[1:]] == passed
    assert all(word.unknown is None for command in read for word in command.words)
