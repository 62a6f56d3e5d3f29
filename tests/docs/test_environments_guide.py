"""The game in the guide is one that works, and the command beside it says what the guide shows."""

import shlex
from pathlib import Path

import pytest
from guides import ROOT, block, blocks
from typer.testing import CliRunner

from corral.cli.envs import app


@pytest.mark.slow
def test_the_game_in_the_guide_passes_its_own_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = blocks(ROOT / "docs" / "environments.md")
    [source] = [one.text for one in guide if one.text.startswith("# lights.py")]
    [shown] = [one.text for one in guide if one.text.startswith("lights.py:LightsEnv")]
    assert 30 <= len(source.splitlines()) <= 60
    (tmp_path / "lights.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    [command] = block("env-test").commands
    corral, env, *arguments = shlex.split(command)
    assert (corral, env) == ("corral", "env")
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == 0, said.output
    for line in shown.splitlines():
        assert line in said.output or line.endswith("steps/s")
