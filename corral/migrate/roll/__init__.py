"""ROLL's configurations of its agentic and RLVR pipelines."""

from corral.migrate.roll import advantages_and_losses, environment_tags, pipelines_and_devices, runs_and_batches
from corral.migrate.table import load_table

TABLE = load_table("roll", pipelines_and_devices, environment_tags, runs_and_batches, advantages_and_losses)
