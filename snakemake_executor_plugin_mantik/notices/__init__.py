"""Notify a person who is elsewhere that a run has ended, or that a job has failed.

Nothing here can fail a run, or delay its end for longer than a limit. An address may hold a secret:
no message contains more of it than the host.
"""
