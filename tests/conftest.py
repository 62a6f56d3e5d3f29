"""What many tests need: a tiny random model with a character tokenizer, and a recipe that trains it in seconds."""

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadGroupScheduling

sys.path.insert(0, str(Path(__file__).parent))
from forked_pythons import RAY_PYTHON, forking_python, path_without_forks, start_server
from verdict import Share, Verdict

# A worker of Ray takes one second of a core instead of eight. Agents of nodes have the import path of who starts Ray,
# and with it a Python that forks.
sys.path.append(RAY_PYTHON)
# Ray would start Python processes in advance for every run. Corral's actors, whose environment is their own, use none.
os.environ |= {"RAY_prestart_worker_first_driver": "false"}
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run without a GPU; read when transformers imports triton


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--verdict", action="store_true", help="see tests/verdict.py")
    parser.addoption("--share", metavar="COMMIT", help="run what tests/selection.py chooses")


def pytest_configure(config: pytest.Config) -> None:
    """The processes of xdist are forked: each would import for ten seconds what all need."""
    share = config.option.share
    # How long an example takes depends on what else the machine does. A verdict does not depend on the dice.
    settings.register_profile("corral", deadline=None, derandomize=share is not None)
    settings.load_profile("corral")
    if config.option.verdict:
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Verdict(share))
        if hasattr(config, "workerinput") or not getattr(config.option, "tx", None):
            config.pluginmanager.register(Share(share, CLUSTERS))
    if getattr(config.option, "tx", None) and not hasattr(config, "workerinput"):
        start_server()
        config.option.tx = [f"popen//python={forking_python()}" for _ in config.option.tx]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """A sixth of the time to import all tests would go to the garbage collector, though nothing of them is garbage. One
    collection at the end moves them into the oldest generation, which is looked at again when it has grown by a
    quarter."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()


FIRST = {"ray", "debugger", "node_loss", "cluster", "slurm", "ssh", "podman", "stacks", "four_nodes"}
LAST = {"up", "doctor", "foreign", "trouble", "jobs"}
CLUSTERS = {**dict.fromkeys(FIRST, "first clusters"), **dict.fromkeys(LAST, "last clusters")}
"""The xdist groups of all tests that start a cluster. One of two processes has the first ones, one after the other; the
other begins with all else, and the last ones are at the end: with more at work on two cores, Ray misses deadlines."""


class OneProcessForAFile(LoadGroupScheduling):  # type: ignore[misc]
    """The tests of a file are run by one process, so that what they share is made once, and files with the most tests
    come first. An xdist group does the same over several files."""

    def _split_scope(self, nodeid: str) -> str:
        group: str = super()._split_scope(nodeid)  # the test itself, if it is in no group
        return CLUSTERS.get(group) or group.partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        for unit in set(CLUSTERS.values()) & set(self.workqueue):
            self.workqueue.move_to_end(unit, last=unit == "last clusters")
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneProcessForAFile | None:
    return OneProcessForAFile(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = item.get_closest_marker("xdist_group")
        if group is not None and group.args[0] in CLUSTERS:
            item.add_marker(pytest.mark.deadline("a cluster decides"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    group = item.get_closest_marker("xdist_group")
    if group is not None and group.args[0] in CLUSTERS:
        start_server()  # which forks workers of Ray


@pytest.fixture
def real_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of Ray are started as everywhere else: for tests that look at their processes."""
    monkeypatch.setattr(sys, "path", path_without_forks())


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two threads of a small matrix product are slower than one, and much slower when anything else runs."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in Hugging Face layout; the same weights in every run."""
    from tiny import save_tiny_model  # with transformers: the process of xdist that runs no test does without

    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder)
    return folder
