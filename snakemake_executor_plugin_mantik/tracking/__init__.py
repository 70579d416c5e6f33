"""Track workflows and jobs (of MLproject entry points, or all) as MLflow runs.

    engine ──▶ journal: events of each attempt ──▶ process ──▶ MLflow
       │          ▲                              ▲
       └─ Tracker ┘ describes their runs         │
                                                 │
    the job's own file store ──▶ its copy here ──┘
        (grows while the job runs: `engine.live_copies`; whole when the job has ended)

Only the process imports mlflow. It reads the journal with a cursor of its own (`cursor`), so that
nothing is lost or published twice, whichever process dies.
"""
