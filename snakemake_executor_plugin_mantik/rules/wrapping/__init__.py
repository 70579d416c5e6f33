"""Wrap a command at a site in its environment, MPI, and a shadow directory."""
