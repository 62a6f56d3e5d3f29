"""What is imported by the process that others are forked from (`forked_pythons.py`): commands, and who runs the tests.

The collector is off meanwhile, and looks at all of it once at the end. Else it would do so in each forked process, and
what it looks at is copied. (Frozen, it would not count, and a collection of all else would be due every few thousand
objects.) Not imported is Ray, which reads its token then.
"""

import gc
from importlib import import_module
from importlib.util import find_spec

RAY_NEEDS = ("requests", "jsonschema", "google.protobuf.json_format")
"""What takes a third of the time to import Ray, which each of its workers does."""
OPTIONAL = ("fastapi", "openai.types.chat", "pandas", "peft", *RAY_NEEDS)
gc.disable()
for name in (
    "pytest",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
    "corral.cli.main",
    "corral.cli.migrate",
    "corral.loop.train",
    "corral.runtime.model_workers",
    "corral.runtime.rollout_worker",
    "torch.distributed.tensor",
    *(name for name in OPTIONAL if find_spec(name.partition(".")[0])),
):
    import_module(name)
migrations = import_module("corral.migrate.config_sources")
for system in migrations.TABLES:
    migrations.table_of(system)  # which remembers it
gc.enable()
gc.collect()
