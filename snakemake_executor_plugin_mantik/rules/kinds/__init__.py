"""Render the command of each kind of rule: shell commands, scripts, groups, nested Snakemakes."""
