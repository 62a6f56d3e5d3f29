"""RLinf's configurations of reasoning tasks, and of its agents the one that searches; not of robots and images."""

from corral.migrate.rlinf import component_placement, reasoning, trainers
from corral.migrate.table import load_table

TABLE = load_table("rlinf", reasoning, component_placement, trainers)
