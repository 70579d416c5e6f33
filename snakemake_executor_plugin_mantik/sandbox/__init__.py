"""A site on this machine that speaks UNICORE or firecREST v2 on processes or a Slurm.

settings    what can be set: timings, slots, partitions
sbatch      batch scripts: `#SBATCH` lines, partitions, what sbatch refuses
slurmstepd  what Slurm writes into a job's standard error when it ends the job
processes   looking at and ending all processes of a job
batch       what a site wants of a batch scheduler
scheduler   the local one: queue, slots, limits, states
localjob    its jobs, and what scontrol tells of them
slurm       the other one: this machine's Slurm
schedulers  which of the two
description UNICORE job descriptions: parsing as the server parses, scripts as its TSI writes
jobs        the life of UNICORE jobs, from READY to SUCCESSFUL or FAILED
submitting  their way to the scheduler
staging     imports and exports of jobs
files       storages and files
tsi         UNICORE's arm on the login node, and its errors
access      users, passwords, security sessions
unicore     the REST resources of UNICORE
firecrest   a site that speaks firecREST v2 instead, on the same scheduler
faults      failures on demand
record      what was asked and what ran
server      `Sandbox`: a running one, for tests and for `smk-mantik sandbox`
"""
