"""What the reader of shell scripts makes of them, and that it runs nothing."""

from pathlib import Path

import pytest

from corral.recipe.dialects.shell import Command, read_script
from corral.recipe.errors import RecipeError


def commands(text: str, **defined: str) -> list[Command]:
    return read_script(text, "run.sh", defined).commands


def words(text: str, **defined: str) -> list[str]:
    [command] = commands(text, **defined)
    return command.texts


def test_continued_lines_are_one_command() -> None:
    assert words("python -m train \\\n    a=1 \\\n    b=2\n") == ["python", "-m", "train", "a=1", "b=2"]


def test_each_word_knows_its_line() -> None:
    [command] = commands("X=1\n\ntrain a=1 \\\n  b=2")
    assert [word.line for word in command.words] == [3, 3, 4]


def test_variables_are_put_in() -> None:
    assert words("DIR='data/nq'\nexport N=2\ntrain $DIR/x.parquet n=${N} ${N}x$N") == [
        "train",
        "data/nq/x.parquet",
        "n=2",
        "2x2",
    ]


def test_variables_before_a_command_are_not_words() -> None:
    assert words("PYTHONUNBUFFERED=1 HYDRA=2 train a=1") == ["train", "a=1"]


def test_quotes_are_taken_off_and_keep_spaces() -> None:
    assert words("""train 'a b' "c  d" e\\ f trainer.logger=['console','wandb'] "it's" """) == [
        "train",
        "a b",
        "c  d",
        "e f",
        "trainer.logger=[console,wandb]",
        "it's",
    ]


def test_unquoted_variables_split_at_spaces() -> None:
    assert words('ARGS="a=1 b=2"\ntrain $ARGS "$ARGS"') == ["train", "a=1", "b=2", "a=1 b=2"]


def test_arrays_become_words() -> None:
    script = 'DATA=(\n  data.x=1  # why\n  "data.y=a b"\n)\nDATA+=(z=3)\ntrain "${DATA[@]}" "$@"'
    assert words(script) == ["train", "data.x=1", "data.y=a b", "z=3"]


def test_defaults_of_variables() -> None:
    assert words("train ${A:-1} ${B:-${C:-deep}} ${D-x}", B="given") == ["train", "1", "given", "x"]


def test_whole_numbers_are_worked_out() -> None:
    assert words("N=4\ntrain $((1024 * N)) $(( $N / 3 )) $((2-(1)))") == ["train", "4096", "1", "1"]


def test_powers_are_not_worked_out() -> None:
    [command] = commands("train $((9**9**9**9))")
    assert command.words[1].unknown is not None


def test_slurm_says_its_numbers_in_comments() -> None:
    script = "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\ntrain ${SLURM_NNODES} $SLURM_GPUS_PER_NODE"
    assert words(script) == ["train", "2", "8"]


def test_comments_and_redirections_are_left_out() -> None:
    assert words("# first\ntrain a=1 2>&1 > log.txt < in # x=2") == ["train", "a=1"]


def test_a_pipe_makes_another_command() -> None:
    first, second = commands("train a=1 2>&1 | tee log \\\n b=2")
    assert (first.texts, first.piped) == (["train", "a=1"], False)
    assert (second.texts, second.piped) == (["tee", "log", "b=2"], True)


def test_texts_for_commands_are_skipped() -> None:
    assert [command.texts[0] for command in commands("cat <<EOF\ntrain x=1\nEOF\ndone_with")] == ["cat", "done_with"]


def test_an_unset_variable_is_a_doubt_of_who_uses_it() -> None:
    script = "NAME=${train_data}-em\necho $OTHER\ntrain name=$NAME a=1"
    train = commands(script)[-1]
    assert train.words[1].text == "name=-em"
    assert train.words[1].doubts == ("run.sh:1: $train_data is not set in the script, so it is empty",)
    assert not train.words[2].doubts


def test_a_variable_from_a_branch_is_a_doubt() -> None:
    train = commands("if [ $1 = big ]; then\n  N=8\nelse\n  N=1\nfi\ntrain n=$N")[-1]
    assert train.texts == ["train", "n=1"]
    assert train.words[1].doubts == ("run.sh:4: $N is set inside a branch or a loop; its last value is taken",)


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
    assert script.odd_lines == ["run.sh:1: there is a space behind the `\\`, so that the command ends here"]
