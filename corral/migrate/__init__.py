"""Recipes of other systems, read into ours: verl and Search-R1, ROLL, RLinf."""
