"""Each kind of rule, and what it runs: shell commands, scripts, groups, and full jobs."""
