"""Clusters: bringing one up on its nodes, checking it, submitting to it, and the files that launchers need for it."""
