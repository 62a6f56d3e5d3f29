"""What the reader of shell scripts makes of them, and that it runs nothing."""

from pathlib import Path

import pytest

from corral.migrate.shell import ShellCommand, read_script
from corral.recipe.errors import RecipeError


def commands(text: str, **defined: str) -> list[ShellCommand]:
    return read_script(text, "run.sh", defined).commands


def words(text: str, **defined: str) -> list[str]:
    [command] = commands(text, **defined)
    return command.texts


def test_each_word_knows_its_line() -> None:
    [command] = commands("X=1\n\ntrain a=1 \\\n  b=2")
    assert [word.line for word in command.words] == [3, 3, 4]


def test_powers_are_not_worked_out() -> None:
    [command] = commands("train $((9**9**9**9))")
    assert command.words[1].unknown is not None


def test_slurm_says_its_numbers_in_comments() -> None:
    script = "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\ntrain ${SLURM_NNODES} $SLURM_GPUS_PER_NODE"
    assert words(script) == ["train", "2", "8"]


def test_a_pipe_makes_another_command() -> None:
    first, second = commands("train a=1 2>&1 | tee log \\\n b=2")
    assert (first.texts, first.piped) == (["train", "a=1"], False)
    assert (second.texts, second.piped) == (["tee", "log", "b=2"], True)


def test_an_unset_variable_is_a_doubt_of_who_uses_it() -> None:
    script = "NAME=${train_data}-em\necho $OTHER\ntrain name=$NAME a=1"
    train = commands(script)[-1]
    assert train.words[1].text == "name=-em"
    assert train.words[1].warnings == ("run.sh:1: $train_data is not set in the script, so it is empty",)
    assert not train.words[2].warnings


def test_a_branch_that_the_text_decides_is_followed() -> None:
    script = "MODE=${MODE:-big}\nif [ $MODE = big ]; then\n  N=8\nelse\n  N=1\nfi\ntrain n=$N"
    assert commands(script)[-1].texts == ["train", "n=8"]
    assert commands(script, MODE="small")[-1].texts == ["train", "n=1"]
    assert not read_script(script, "run.sh").other_ways


def test_a_branch_that_only_running_decides_is_read_both_ways() -> None:
    script = read_script("if [ -d /data ]; then\n  N=8\nelse\n  N=1\nfi\ntrain n=$N", "run.sh")
    [(question, other)] = script.other_ways
    assert script.commands[-1].texts == ["train", "n=8"]
    assert (question.node.line, question.what) == (1, "[ -d /data ]")
    assert other.commands[-1].texts == ["train", "n=1"]


def test_a_question_inside_another_is_read_as_well() -> None:
    script = read_script("if one; then A=1; elif two; then A=2; else A=3; fi\ntrain $A", "run.sh")
    assert [way.commands[-1].texts[1] for _, way in script.other_ways] == ["2", "3"]


def test_the_question_for_an_npu_is_answered_with_no() -> None:
    script = "DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}\ntrain $DEVICE"
    assert words(script) == ["train", "gpu"]
    assert words(script, DEVICE="npu") == ["train", "npu"]
    assert not read_script(script, "run.sh").other_ways


def test_a_script_that_wants_arguments_is_read_as_if_it_had_them() -> None:
    script = read_script('if [ "$#" -lt 2 ]; then\n  echo usage; exit 1\nfi\ntrain n=$1', "run.sh")
    assert script.exit_line == 2
    [(question, other)] = script.other_ways
    assert question.of_arguments
    assert other.commands[-1].texts == ["train", "n="]


def test_a_loop_that_does_not_end_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"^run\.sh:1: the loop has more than 200 rounds"):
        commands("while true; do A=1; done")


def test_the_folder_of_the_script_is_known() -> None:
    script = 'D=$(cd -- "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null 2>&1 && pwd)\ntrain $D $PWD $(dirname $0)'
    assert read_script(script, "examples/ppo/run.sh").commands[-1].texts == ["train", "examples", ".", "examples/ppo"]


def test_nothing_is_run(tmp_path: Path) -> None:
    hit = tmp_path / "hit"
    script = f"X=$(touch {hit})\nY=`touch {hit}`\ntrain $X a=$Y $(touch {hit}) ; touch {hit} && touch {hit} | sh"
    train = next(command for command in commands(script) if command.texts[0] == "train")
    assert {word.unknown for word in train.words[1:]} == {f"touch {hit}"}
    assert not hit.exists()


@pytest.mark.parametrize("text", ["train 'a", 'train "a', "train $(a", "train ${a", "A=(a", "train $((1", "train `a"])
def test_what_is_left_open_is_one_clear_error(text: str) -> None:
    with pytest.raises(RecipeError, match=r"^run\.sh:1: a .+ is not closed$"):
        commands(text)


def test_variables_that_double_each_other_are_refused() -> None:
    script = "A=aaaaaaaaaa\n" + "A=$A$A\n" * 40 + "train $A"
    with pytest.raises(RecipeError, match="more than 100000 characters"):
        commands(script)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RecipeError, match="nested too deeply"):
        commands("train " + "${a:-" * 100 + "x" + "}" * 100)


def test_a_space_behind_a_backslash_is_told() -> None:
    script = read_script("train a=1 \\ \n  b=2\n", "run.sh")
    assert script.broken_lines == ["run.sh:1: there is a space behind the `\\`, so that the command ends here"]


# --- what is not known


def test_arguments_of_the_script_are_doubts_and_can_be_given() -> None:
    [command] = commands('train a=$1 b=${2} "$@" $*')
    assert command.texts == ["train", "a=", "b="]
    assert [word.warnings for word in command.words[1:]] == [
        ("run.sh:1: $1 is an argument of the script; give it with --define 1=VALUE",),
        ("run.sh:1: $2 is an argument of the script; give it with --define 2=VALUE",),
    ]
    assert words("train a=$1 b=${2:-x}", **{"1": "given"}) == ["train", "a=given", "b=x"]
    assert commands("train n=$#")[0].words[1].warnings


def test_a_shift_moves_the_arguments() -> None:
    train = commands("shift\ntrain a=$1", **{"2": "second"})[-1]
    assert train.texts == ["train", "a=second"]


@pytest.mark.parametrize(
    ("script", "unknown"),
    [
        ("for A in $(ls); do :; done", "the loop over A"),
        ("A=1\nwhile read -r line; do A=2; done < x", "the loop over A"),
        ("A=1\nread -r A", "read A"),
        ("mapfile -t A < x", "mapfile A"),
        ("A=(1)\nA[0]=2", "A[0]=2"),
        ("A=([0]=x)", "A=([...]=...)"),
        ("declare -i A=3+4", "declare -i A"),
        ("B=1\nA=${B/#1/2}", "${B/#1/2}"),
        ("A=$RANDOM", "$RANDOM"),
        ("[[ ab =~ (a)b ]]; A=${BASH_REMATCH[1]}", "=~"),
        ("A=$((10#08))", "$((10#08))"),
        ("A=$((B[1]))", "$((B[1]))"),
        ("A=a.b\nA=${A%[[:alpha:]]}", "${A%[[:alpha:]]}"),
        ("A=$(nvidia-smi -L | wc -l)", "nvidia-smi -L | wc -l"),
    ],
)
def test_stale_values_are_unknown(script: str, unknown: str) -> None:
    train = commands(script + "\ntrain a=$A")[-1]
    assert train.words[1].unknown == unknown


def test_what_the_shell_works_out_stays_as_written() -> None:
    assert words("train a=${!A}-b") == ["train", "a=${!A}-b"]


def test_doubts_of_words_that_vanish_go_to_their_neighbour() -> None:
    train = commands('train a=1 "${ARGS[@]}"')[-1]
    assert train.texts == ["train", "a=1"]
    assert train.words[1].warnings == ("run.sh:1: $ARGS is not set in the script, so it is empty",)


def test_only_what_is_exported_is_said_to_be() -> None:
    script = read_script("export A B=1\ndeclare -x C=2\ndeclare D=3\nlocal E=4\nreadonly F=5\nexport -n G", "run.sh")
    assert script.exported == ["A", "B", "C"]


@pytest.mark.parametrize("first", ["X=(aaaaa b)", 'X=("" "")'])
@pytest.mark.slow
def test_arrays_that_double_each_other_are_refused(first: str) -> None:
    script = f"{first}\n" + 'X=("${X[@]}" "${X[@]}")\n' * 60
    with pytest.raises(RecipeError, match="all values together have more than"):
        commands(script)


@pytest.mark.parametrize("text", ["cat <<E\n", "X+=(a)\n", "a && ", "a | ", "[[ a ]]; ", "if a; then b; fi\n"])
def test_long_scripts_are_read_to_their_end(text: str) -> None:
    commands(text * 50 + "end")


@pytest.mark.parametrize("text", ["((", "((a) ", "(A=1;", "if a;", "function f ", "[[ a ( ", "fi\n", "a;;", "| b"])
def test_what_bash_cannot_read_either_is_one_clear_error(text: str) -> None:
    with pytest.raises(RecipeError, match=r"^run\.sh:[0-9]+: .*(not closed|nested too deeply|cannot stand here)$"):
        commands(text * 3000)


@pytest.mark.parametrize("text", ["A=(", "$(", '"$(', "${A:-", "`$("])
def test_brackets_in_brackets_are_one_clear_error(text: str) -> None:
    with pytest.raises(RecipeError, match=r"is not closed|is nested too deeply"):
        commands(text * 3000)


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("train a=1 \\\n  # why\n  b=2\n", "run.sh:1: the command ends here: line 2 is a comment"),
        ("train a=1 \\\n# b=2 \\\nc=3\n", "run.sh:1: the command ends here: line 2 is a comment"),
        ("train \\\n  a=1 \\\n\n  b=2\n", "run.sh:2: the command ends here: line 3 is empty"),
        ("train \\\n  a=1 \\\n\necho done\n", None),
        ("train \\\n  a=1 \\\n", None),
        ("# train \\\n# a\n  b=1", None),
    ],
)
def test_a_continued_line_that_goes_nowhere_is_told(text: str, odd: str | None) -> None:
    assert read_script(text, "run.sh").broken_lines == ([odd] if odd else [])


def test_a_variable_that_a_script_demands_is_named() -> None:
    for script in (': "${MODEL:?set it}"\ntrain m=$MODEL', "MODEL=${MODEL:?}\ntrain m=$MODEL", "train m=${MODEL:?}"):
        assert [word.unknown for word in commands(script)[-1].words] == [None, "MODEL"]
        assert commands(script, MODEL="x")[-1].words[1].text == "m=x"
    assert words("MODEL=\ntrain m=${MODEL?}") == ["train", "m="]
    assert words("train m=${MODEL:-a}") == ["train", "m=a"]


def test_what_the_user_gives_wins() -> None:
    assert words("N=$(nproc)\ntrain n=$N", N="4") == ["train", "n=4"]


def test_commands_that_only_take_texts_apart_are_known() -> None:
    script = "MODEL=hub/Qwen2.5-7B\ntrain $(pwd)/x $(basename $MODEL) $(dirname $MODEL) run-$(date +%F)"
    assert words(script) == ["train", "./x", "Qwen2.5-7B", "hub", "run-"]
