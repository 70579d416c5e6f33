"""Figures: what a job costs in requests, CPU and time. `make bench` runs all of them."""
