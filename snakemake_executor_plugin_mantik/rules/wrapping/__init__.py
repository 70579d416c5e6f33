"""What is put around a command at a site: its environment, MPI, and a shadow directory."""
