"""ROLL's configurations of its agentic and RLVR pipelines."""

from corral.migrate.roll import advantages_and_losses, device_mapping, environment_tags, pipelines, runs_and_batches
from corral.migrate.table import load_table

TABLE = load_table("roll", pipelines, device_mapping, environment_tags, runs_and_batches, advantages_and_losses)
