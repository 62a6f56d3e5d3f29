"""ROLL's configurations of its agentic and RLVR pipelines."""
