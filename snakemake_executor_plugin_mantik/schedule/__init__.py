"""Schedules submit a run again at its due times.

    smk-mantik schedule run ─▶ loop: claims due times ─▶ fire, a process for each: runs.rerun
                                        └────────── store ──────────┘

Each due time is fired once, or the store records why not:

- A scheduler claims it in the store before any other step. It can be claimed once only, so two
  schedulers fire it once.
- The claim includes a key that the new run is submitted under. A submission that was killed is
  repeated under the same key, and `runs.rerun` makes one run per key. Only the process that holds
  the schedule's lock submits, so a firing that has begun and is not locked was interrupted.
- A failed submission is repeated until the next due time is claimed, then given up. An interrupted
  one may have made a run, so it is repeated even then. Both are given up a week after their time.

The code reads the time only from the clock that it is given.
"""
