"""The Compute Backend Config: one file per site, its model, its reading, and what it means."""
