"""A site that speaks firecREST v2.

Emulated is firecREST 2.6 that reaches a Slurm 22.05 by its commands over ssh, with S3 for large
files; facts, quirks and words were measured at a real one.

answers     answers and errors in firecREST's forms
tokens      the identity provider: access tokens, and who is let in
shell       commands on the login node: their time, their number, their errors
commands    the commands on files, as functions
accounting  what squeue and sacct tell about jobs, and when
compute     jobs over REST
operations  files over REST, at once
transfers   files over REST, in jobs
store       the object store that large files travel through
status      the system over REST
site        `FirecrestSite`
"""
