"""Tracking: workflows, and jobs that run an MLproject's entry point or are to have one, are runs.

    engine ──▶ Tracker ──▶ Outbox (SQLite) ◀── worker process ──▶ MLflow
                                                    ▲
    the job's own file store, fetched with its logs ┘

What is kept of a workflow and of each of its jobs (`Ledger`), for counts and pictures, is in the
outbox's file, too. Only the worker process imports mlflow. What is to be told is in the outbox
before it is told, so that nothing is lost or told twice, whoever dies.
"""
