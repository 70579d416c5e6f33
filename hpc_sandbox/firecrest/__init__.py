"""A site that speaks firecREST v2: `site.FirecrestServer`.

It imitates firecREST 2.6 with Slurm's 22.05 commands over ssh and S3 for large files. Behaviour,
quirks and messages were measured at a real server.
"""
