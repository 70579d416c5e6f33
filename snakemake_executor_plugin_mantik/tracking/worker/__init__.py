"""The worker process: publishes to MLflow what the outbox and the stores of jobs hold."""
