"""Tracking in the controller: records events in the outbox, and starts the worker process."""
