"""Views of a workflow's jobs and their logs, for people who look while and after they run.

All read the journal without its lock, beside a running controller, which asks the sites anyway.
Without a controller, a view asks the sites itself, and only when the user wants it.
"""
