"""What is wrong with a node or a cluster, found before a run finds it.

A check is a function from facts to findings. Facts are gathered on each node by its agent (`agent.py`), and what one
node cannot know alone (ports, clocks, bandwidth, the same files everywhere) by asking all of them (`survey.py`).
"""
