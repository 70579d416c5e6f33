"""Where the files that a job names lie at its site, and how its own text names them there."""
