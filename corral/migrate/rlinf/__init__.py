"""RLinf's configurations of reasoning tasks, and of its agents the one that searches; not of robots and images."""
