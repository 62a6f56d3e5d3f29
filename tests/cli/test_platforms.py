"""What other systems than Linux meet. There is none to try on: these processes believe that they are elsewhere."""

import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import corral
from runs import write_recipe

from corral.model.model_loading import resolve_dtype

CLUSTER_VERBS = [
    "up",
    "down",
    "check 1",
    "status",
    "stacks",
    "doctor",
    "chaos x",
    "submit x",
    "jobs",
    "logs x",
    "stop x",
]
ONLY_LINUX_HAS = ("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "eventfd", "copy_file_range")
ON_WINDOWS = """\
import signal, sys, typer
sys.platform = "win32"
for name in ("fcntl", "resource", "termios", "pwd", "grp", "readline"):
    sys.modules[name] = None
del signal.SIGHUP, signal.SIGKILL
sys.argv = ["corral", *sys.argv[1:]]
from corral.cli.main import main
main()
"""


def be_on_macos() -> None:
    """Also without /proc, as far as Python opens it."""

    class WithoutMkldnn:
        """As in builds for macOS, where the operators are missing too."""

        def __getattr__(self, name: str) -> None:
            raise AttributeError(name)

    sys.platform = "darwin"
    for name in ONLY_LINUX_HAS:
        if hasattr(os, name):
            delattr(os, name)
    torch.backends.mkldnn.is_available = lambda: False  # type: ignore[assignment]
    torch.ops.mkldnn = WithoutMkldnn()
    real_open, real_readlink = builtins.open, os.readlink

    def open_elsewhere(file, *arguments, **options):
        if str(file).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return real_open(file, *arguments, **options)

    def readlink_elsewhere(path, *arguments, **options):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real_readlink(path, *arguments, **options)

    builtins.open, os.readlink = open_elsewhere, readlink_elsewhere


def test_windows_is_one_line_before_anything_is_loaded() -> None:
    for arguments in ([], ["train", "recipe.yaml"], ["--help"]):
        command = [sys.executable, "-c", ON_WINDOWS, *arguments]
        finished = subprocess.run(command, capture_output=True, text=True)
        assert finished.returncode == 2
        [line] = finished.stderr.splitlines()
        assert line.startswith("error: ")
        assert "use WSL" in line


@pytest.mark.parametrize("verb", CLUSTER_VERBS)
def test_on_macos_a_cluster_verb_is_one_line(tmp_path: Path, verb: str) -> None:
    finished = corral(tmp_path, *verb.split(), before=be_on_macos)
    assert finished.code == 2
    [line] = finished.stderr.splitlines()
    assert line.startswith(f"error: `corral {verb.split()[0]}` needs Linux")


def test_on_macos_a_recipe_trains_on_the_cpu(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    finished = corral(tmp_path, "train", "recipe.yaml", "model.dtype=auto", before=be_on_macos)
    assert finished.code == 0, finished.stderr
    assert "step 2/2" in finished.stdout


def test_on_macos_a_recipe_for_a_cluster_is_planned_and_not_trained(tmp_path: Path, tiny_model: Path) -> None:
    write_recipe(tmp_path, tiny_model)
    for verb, code in (("plan", 0), ("train", 2)):
        finished = corral(tmp_path, verb, "recipe.yaml", "cluster.devices_per_node=2", before=be_on_macos)
        assert finished.code == code, finished.stderr
    [line] = finished.errors
    assert "needs Linux" in line


def test_a_build_without_mkldnn_trains_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", object(), raising=False)
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
