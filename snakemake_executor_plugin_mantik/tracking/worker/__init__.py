"""The worker process: publish the outbox and the stores of jobs to MLflow."""
