"""Tracking: each run of an MLproject's entry point is an MLflow run.

    engine ──▶ Tracker ──▶ Outbox (SQLite) ◀── worker process ──▶ MLflow
                                                    ▲
    the job's own file store, fetched with its logs ┘

Only the worker process imports mlflow. What is to be told is in the outbox before it is told, so
that nothing is lost or told twice, whoever dies.
"""
