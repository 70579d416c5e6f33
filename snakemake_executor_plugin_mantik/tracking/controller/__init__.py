"""Tracking in the controller: write events to the outbox, and start the worker process."""
