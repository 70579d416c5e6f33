"""Map the paths of a job to those at its site, and rewrite the job's text accordingly."""
