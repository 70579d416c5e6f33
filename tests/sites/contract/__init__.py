"""What the engine may rely on, whatever the site: each site of this package passes this suite.

It holds against a sandbox and a real server of each API, with the same tests: none is left out for
a site, and none asks which one it has.
"""
