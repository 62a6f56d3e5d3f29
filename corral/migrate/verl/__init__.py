"""verl, from 0.3 on. Its keys are in `tables/verl.yaml`; conversions of those that need code are here."""

from corral.migrate.table import load_table
from corral.migrate.verl import algorithm, run

TABLE = load_table("verl", algorithm, run)
