"""Guides as they are: what becomes of the commands and configurations in a page, with fences or without."""

import json
import re
from pathlib import Path

import pytest
from commands import corral

from corral.migrate.guide import Guide, read_guide
from corral.migrate.migration import RefusedConfig
from corral.recipe.errors import RecipeError

PAGE = """\
# 两个节点

启动**头**节点：`ray start --head --dashboard-host=0.0.0.0`，其它节点用 ```ray start --address=<address>```。

```shell
curl -fsSL https://example.com/install_nvidia_container_toolkit.sh | sudo bash
sudo docker run -dit \\
  --gpus all \\
  image /bin/bash
export MODEL='Qwen/Qwen2.5-0.5B'  # 模型
export NCCL_SOCKET_IFNAME=eth0
bash ray_utils/check_ray.sh 32
```

- ray job logs <Submission ID>：查询作业的日志。

每个节点都运行检索器：

```
bash retrieval_launch.sh
```

```bash
$ ray job submit --address="http://127.0.0.1:8265" \\
    -- python3 -m verl.trainer.main_ppo \\
    data.train_files=train.parquet \\
    data.train_batch_size=64 \\
    actor_rollout_ref.model.path=$MODEL \\
    trainer.nnodes=2 \\
    trainer.n_gpus_per_node=2
python job.py
```
"""
OURS = {
    3: "corral up",
    6: "corral launch host-setup > setup.sh",
    7: "corral launch docker recipe.yaml --head HOST",
    11: "the same variables",
    12: "corral check 32",
    15: "corral logs JOB",
    20: "corral retriever build CORPUS INDEX",
    24: "corral submit recipe.yaml",
}
CONFIG = """\
修改要点：

.. code-block:: yaml

   # 单卡
   num_gpus_per_node: 1
   actor_train.device_mapping: list(range(0,1))
   rollout_batch_size: 16
   max_actions_per_traj: 10
   train_env_manager.n_groups: 1

Note: 以上只是例子。
"""


def ours(page: Path) -> dict[int, str]:
    return {one.line: one.ours for one in read_guide(page) if one.ours}


def unfenced(page: str) -> str:
    """The page as a browser shows it: nothing says what is code, and nothing is moved."""
    return re.sub(r"^```.*$", "", page, flags=re.MULTILINE).replace("`", " ").replace("\n- ", "\n")


@pytest.mark.parametrize("text", [PAGE, unfenced(PAGE)], ids=["with fences", "copied"])
def test_every_command_of_a_page_has_its_answer(text: str, tmp_path: Path) -> None:
    (page := tmp_path / "guide.md").write_text(text)
    assert ours(page) == OURS


def test_commands_of_a_page_set_each_others_variables_and_keep_their_lines(tmp_path: Path) -> None:
    (page := tmp_path / "guide.md").write_text(PAGE)
    migration = Guide(page, read_guide(page, changes=["rollout.n=4", "seed=3"])).training()
    assert migration.recipe.model.path == "Qwen/Qwen2.5-0.5B"
    assert (migration.recipe.batch.samples_per_prompt, migration.recipe.seed) == (4, 3)
    nodes = next(one.given for one in migration.entries if one.given.key == "trainer.nnodes")
    assert nodes.where == f"{page}:29"


@pytest.mark.parametrize("text", [CONFIG, CONFIG.replace(".. code-block:: yaml", "")], ids=["with directive", "copied"])
def test_a_piece_of_configuration_becomes_a_recipe(text: str, tmp_path: Path) -> None:
    (page := tmp_path / "guide.rst").write_text(text)
    migration = Guide(page, read_guide(page)).training()
    assert (migration.title, migration.recipe.batch.prompts_per_step) == ("ROLL", 16)
    assert {one.given.where for one in migration.entries} == {f"{page}:{line}" for line in range(6, 11)}


def test_a_mark_down_table_and_sentences_are_read_for_commands_alone(tmp_path: Path) -> None:
    lines = ["| 0 | ``RANK=0 bash ray_utils/start_ray.sh`` |", "make sure that docker is there", "set the name: x"]
    (page := tmp_path / "guide.txt").write_text("\n".join(lines))
    assert [(one.line, one.ours) for one in read_guide(page)] == [(1, "corral up --head-file FILE")]


def test_secrets_of_a_page_are_not_shown(tmp_path: Path) -> None:
    (page := tmp_path / "guide.txt").write_text("export WANDB_API_KEY=0123abc\n")
    [answer] = read_guide(page)
    assert (answer.text, answer.ours) == ("export WANDB_API_KEY=***", "cluster.environment: [NAME]")


def test_a_training_whose_files_are_elsewhere_is_named_and_is_no_recipe(tmp_path: Path) -> None:
    text = (
        "python examples/start_agentic_pipeline.py --config_path here --config_name lake\npython -m x.main_eval a=b\n"
    )
    (page := tmp_path / "guide.txt").write_text(text)
    first, second = read_guide(page)
    assert first.note == "where its files are; here: the configuration lake.yaml is not here"
    assert "an evaluation, which is not migrated" in second.note
    assert (first.found, second.found) == (None, None)
    with pytest.raises(RecipeError, match="0 trainings begin here"):
        Guide(page, [first, second]).training()


def test_a_configuration_that_is_refused_says_so_and_the_rest_is_answered(tmp_path: Path) -> None:
    (page := tmp_path / "guide.md").write_text(PAGE.replace("train_batch_size=64", "train_batch_size=many"))
    assert ours(page) == {line: text for line, text in OURS.items() if line != 24}
    with pytest.raises(RefusedConfig, match="train_batch_size"):
        Guide(page, read_guide(page)).training()


def test_one_training_goes_on_as_a_script_does_and_several_are_named_by_their_lines(tmp_path: Path) -> None:
    (tmp_path / "one.md").write_text(PAGE)
    (tmp_path / "two.md").write_text(PAGE + CONFIG)
    made = corral(tmp_path, "migrate", "one.md", "--strict")
    assert made.code == 0, made.stderr
    assert "path: Qwen/Qwen2.5-0.5B" in made.stdout
    assert "one.md:12: bash ray_utils/check_ray.sh 32\n    corral check 32" in made.stderr
    assert "64 trajectories" in corral(tmp_path, "migrate", "one.md", "--plan").stdout
    several = corral(tmp_path, "migrate", "two.md")
    assert (several.code, several.stdout) == (0, "")
    assert "corral migrate two.md:24 > recipe.yaml\n    corral migrate two.md:38 > recipe.yaml" in several.stderr
    assert "name one: two.md:24, two.md:38" in corral(tmp_path, "migrate", "two.md", "--plan").stderr
    piece = json.loads(corral(tmp_path, "migrate", "two.md:38", "--json", "rollout_batch_size=32").stdout)
    assert piece["system"] == "ROLL"
    assert [one["ours"] for one in piece["guide"] if one["line"] == 12] == ["corral check 32"]
