"""Shared by all rooms: errors, locks, the state directory, readable amounts."""
