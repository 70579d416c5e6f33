"""Schedules: a run that is submitted again whenever its time has come.

    smk-mantik schedule run ─▶ loop: claims due times ─▶ fire, a process for each: runs.rerun
                                        └────────── store ──────────┘

Each due time is fired once, or it is told why not:

- It is claimed in the store before anything is done about it, and can be claimed once: so two
  schedulers fire it once.
- With the claim goes a key that the new run is submitted under. What was killed in the middle of it
  is submitted again under the same key, and `runs.rerun` makes one run of a key. Only the process
  that holds the schedule's lock submits, so what is begun and not locked was interrupted.
- One that fails is repeated until the next is due. Then it is given up, except where it was
  interrupted and may have come to something: that is brought to an end first.

No clock but the one that is handed in is looked at.
"""
