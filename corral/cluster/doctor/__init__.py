"""Checks of a node or a cluster, which find what is wrong before a run does.

A check is a function from facts to findings. Each node gathers its facts itself (`node_inspector.py`); what one node
cannot know alone (ports, clocks, bandwidth, the same files everywhere) needs all of them (`diagnose.py`).
"""
