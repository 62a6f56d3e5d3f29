"""Runs that the cluster does by itself, on Ray's job API: submitted with all they need, then listed, followed and
stopped from any terminal. The one they were submitted from may close."""
