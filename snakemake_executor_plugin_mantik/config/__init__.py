"""The Compute Backend Config, one file per site: its model and the code that reads it."""
