"""Tests on real servers and programs, run by `make test-real`; `make test` leaves them out."""
