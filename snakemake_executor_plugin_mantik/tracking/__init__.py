"""Track workflows and jobs (of MLproject entry points, or all) as MLflow runs.

    engine ──▶ Tracker ──▶ Outbox (SQLite) ◀── worker process ──▶ MLflow
                                                    ▲
    the job's own file store ──▶ its copy here ─────┘
        (grows while the job runs: `engine.live_copies`; whole when the job has ended)

The outbox's file also holds the records of workflows and their jobs (`Ledger`), for counts and
pictures. Only the worker process imports mlflow. Each event is in the outbox before it is
published, so that none is lost or published twice, whichever process dies.
"""
