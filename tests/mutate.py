"""Whether the fast tests notice when code is wrong: mutation testing by hand, for reviewers.

    make mutate ROOM=rollout    the mutations of corral/rollout; without ROOM, all of them

Each of MUTATIONS is applied to a copy of the working tree. The fast tests of the room (tests/rollout) run there until
one fails, those of the nearest file first. The test that failed has to pass again without the mutation.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_S = 900
"""Seconds of the tests of one mutation."""

MUTATIONS = r"""
corral/algorithms/advantages.py: generalized advantage estimation does not discount the next value
-     deltas = rewards + options.gamma * ragged.shift_left(values, offsets) - values
+     deltas = rewards + ragged.shift_left(values, offsets) - values

corral/algorithms/advantages.py: RLOO compares with the mean of all samples, its own among them
- count / (count - 1).clamp(min=1) * batch.centered_rewards
+ batch.centered_rewards

corral/algorithms/advantages.py: a group alone passes for the whole batch, so that an estimator may whiten over it
-             self.is_whole,
+             True,

corral/algorithms/losses.py: the dual clip never applies
-         beyond = (terms.advantages < 0) & (loss > bound)
+         beyond = torch.zeros_like(terms.mask)

corral/algorithms/corrections.py: dropped tokens always count in what the loss is divided by
- Correction(weights, keep, keep if leaves else mask,
+ Correction(weights, keep, mask,

corral/training/native_trainer.py: after one loss that is not finite, all updates are skipped
-             self.has_bad_loss = False
-             return self.optimizer.skip()
+             return self.optimizer.skip()

corral/training/native_trainer.py: a token's log-prob is that of another target
- pack.batch.tokens[pack.flat[targets[order]]]
+ pack.batch.tokens[pack.flat[targets]]

corral/training/native_trainer.py: a resumed run begins its learning rate's schedule again
-         optimizer.load_counters(json.loads((folder / "optimizer.json").read_text()))

corral/training/native_trainer.py: an update changes the weights while the checkpoint's copies are made
-         self.saving.wait_for_copies()
-         if self.mesh.any(self.has_bad_loss):
+         if self.mesh.any(self.has_bad_loss):

corral/training/optimizer.py: float16's gradient is not divided by the loss scale
- / (norm + 1e-6)) * scale / self.scaler.scale
+ / (norm + 1e-6)) * scale

corral/training/checkpoint.py: one checkpoint more than `keep` stays
- valid[-(keep or len(valid)) :]
+ valid[-(keep or len(valid)) - 1 :]

corral/rollout/slot_core.py: a prefix that other weights computed is continued (slots)
-             return prefix.length if prefix.version == self.version else 0
+             return prefix.length

corral/rollout/prefill_scheduler.py: a prefix that other weights computed is continued (pages)
- (list(prefix.pages), prefix.length) if prefix.version == self.version else ([], 0)
+ (list(prefix.pages), prefix.length)

corral/rollout/slot_core.py: cached prefixes have no bound
-             if branch.length <= room and wanted:
+             if wanted:

corral/rollout/prefill_scheduler.py: a prefill batch takes any number of prompts that are short enough
-                 tokens_left -= len(group.tokens) - group.num_cached

corral/rollout/driver.py: a turn's reward is on the token before its last one
-         last = len(self.tokens) - 1
+         last = len(self.tokens) - 2

corral/rollout/driver.py: an observation that fills the budget exactly is taken
-             if len(self.tokens) - start + len(observation) >= budget:
+             if len(self.tokens) - start + len(observation) > budget:

corral/data/batch.py: packing counts a common prefix once for each trajectory
-             used += length - num_shared
+             used += length

corral/data/batch.py: chosen trajectories are masked as the first ones are
- self.is_masked[list(rows)]
+ self.is_masked[: len(rows)]

corral/data/supervised.py: the two answers of a pair are cut at different places of their prompt
- (tokens[start:][:max_tokens], trained[start:][:max_tokens])
+ (tokens[max(0, start + len(tokens) - longest) :][:max_tokens],
+ trained[max(0, start + len(tokens) - longest) :][:max_tokens])

corral/data/sampler.py: all sources of a mix are shuffled in one order
- [self._seed, epoch, source] if source else [self._seed, epoch]
+ [self._seed, epoch]

corral/recipe/memory.py: whole copies of a model need as little memory as shards
- int(of_stage * mesh.replicate / mesh.stage_size)
+ int(of_stage / mesh.stage_size)

corral/recipe/default_mesh.py: a copy that is spread over nodes passes for one within a node
- span[0] // per_node == span[-1] // per_node
+ span[0] // per_node <= span[-1] // per_node

corral/recipe/default_mesh.py: the default mesh fills a device to the last byte
-         if needed <= MARGIN * available * GIB:
+         if needed <= available * GIB:

corral/recipe/rules.py: where the placement is wrong, nothing else that is wrong is reported
- RecipeError([*problems, *error.problems])
+ RecipeError(error.problems)
"""
"""Of each the file, what is wrong then, the text that is replaced (which occurs once), and its replacement."""


@dataclass(frozen=True)
class Mutation:
    file: str
    breaks: str
    old: str
    new: str

    @classmethod
    def parse(cls, text: str) -> "Mutation":
        first, *lines = text.splitlines()
        old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in ("- ", "+ "))
        return cls(*first.split(": ", 1), old, new)

    @property
    def room(self) -> str:
        return Path(self.file).parts[1]

    def tests(self, tree: Path) -> list[Path]:
        """The test files of the room: that of the same name, then those that import the module, then the others."""
        name, module = f"test_{Path(self.file).name}", self.file.removesuffix(".py").replace("/", ".")
        files = sorted((tree / "tests" / self.room).glob("test_*.py"))
        return sorted(files, key=lambda file: (file.name != name, f"from {module} import" not in file.read_text()))


def copy_tree(copy: Path) -> None:
    """Copies what git tracks, and new files."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)


def first_failure(tree: Path, *tests: Path | str) -> str | None:
    """The first of the fast tests that fails; None: all pass."""
    options = ["-n", "0", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-m", "not slow and not lab"]
    command = ["timeout", "--kill-after=10", str(LIMIT_S), sys.executable, "-m", "pytest", *options, *tests]
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?::.+?)(?: - .*)?$", ended.stdout, re.MULTILINE)
    if ended.returncode != (failed is not None):
        raise RuntimeError(f"pytest ended with {ended.returncode} (124: after {LIMIT_S} s): {ended.stdout[-1000:]}")
    return failed and failed[1]


def result_of(mutation: Mutation, tree: Path) -> tuple[bool, str]:
    """Whether the mutation was noticed, and by which test."""
    file = tree / mutation.file
    original = file.read_text()
    if (count := original.count(mutation.old)) != 1:
        return False, f"TEXT NOT FOUND: it is in the file {count} times; bring MUTATIONS up to date"
    try:
        file.write_text(original.replace(mutation.old, mutation.new))
        test = first_failure(tree, *mutation.tests(tree))
        file.write_text(original)
        if test is None:
            return False, "NOT NOTICED"
        return (False, f"FAILS WITHOUT IT, TOO: {test}") if first_failure(tree, test) else (True, test)
    except RuntimeError as error:
        return False, f"ERROR: {error}"
    finally:
        file.write_text(original)


def main(room: str = "") -> int:
    mutations = [Mutation.parse(text) for text in MUTATIONS.strip().split("\n\n")]
    mutations = [mutation for mutation in mutations if room in ("", mutation.room)]
    num_noticed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for mutation in mutations:
            started = time.monotonic()
            is_noticed, by = result_of(mutation, Path(folder))
            num_noticed += is_noticed
            print(f"{mutation.file}: {mutation.breaks}\n{time.monotonic() - started:6.0f} s  {by}", flush=True)
    print(f"{num_noticed} of {len(mutations)} mutations were noticed by the fast tests of their room")
    return int(num_noticed < max(1, len(mutations)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
