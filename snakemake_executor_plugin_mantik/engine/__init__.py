"""The engine: a module per step of a job's life, and the loop that they run in."""
