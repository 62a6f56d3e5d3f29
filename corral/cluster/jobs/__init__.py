"""Runs that the cluster does by itself, on Ray's job API: sent with all they need, then looked at, followed and stopped
from any terminal. The one they were sent from may close."""
