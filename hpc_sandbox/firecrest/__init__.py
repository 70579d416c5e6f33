"""A site that speaks firecREST v2.

It imitates firecREST 2.6 with Slurm's 22.05 commands over ssh and S3 for large files. Behaviour,
quirks and messages were measured at a real server.

answers     errors in firecREST's form, and what requests hold
tokens      the identity provider, its access tokens, and their check
shell       the login node: duration of commands, limits, errors
commands    the commands on files, as functions
accounting  records of jobs from squeue and sacct, and their delays
compute     jobs over REST
operations  files over REST, at once
transfers   files over REST, in jobs
store       the object store for large files
site        `FirecrestServer`, and the system over REST
"""
