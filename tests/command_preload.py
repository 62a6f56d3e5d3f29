"""What is imported by the process that the commands of tests are forked from (commands.py).

The collector is off meanwhile, and looks at all of it once at the end. Else it would do so in each forked process, and
what it looks at is copied.
"""

import gc
from importlib import import_module

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
):
    import_module(name)
migrations = import_module("corral.migrate.config_sources")
for system in migrations.TABLES:
    migrations.table_of(system)  # which remembers it
gc.enable()
gc.collect()
