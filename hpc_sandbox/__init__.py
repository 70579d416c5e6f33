"""Sites on this machine that speak UNICORE or firecREST v2 and run jobs as processes or in Slurm.

settings     settings: timings, slots, partitions
sbatch       batch scripts: `#SBATCH` lines, partitions, sbatch's refusals
processes    finding and ending all processes of a job
batch        the interface of batch schedulers
scheduler    the local scheduler: queue, slots, limits, states
local_job    jobs of the local scheduler, and their fields in scontrol
slurm        this machine's Slurm as the scheduler
schedulers   the choice between the two
shims        `srun` and `module` for jobs
description  UNICORE job descriptions, read as the server reads them
resources    units and ranges of resources in job descriptions
scripts      the scripts that UNICORE and its TSI make of a job description
jobs         the life of UNICORE jobs, from READY to SUCCESSFUL or FAILED
submitting   submission of UNICORE jobs to the scheduler
login        commands on the login node
staging      imports and exports of jobs
files        storages and files
tsi          UNICORE's TSI on the login node, and its errors
access       users, passwords, security sessions
answers      responses in UNICORE's forms
job_resources  the REST resources of jobs
unicore      the REST resources of UNICORE
firecrest    a site that speaks firecREST v2 instead, on the same scheduler
faults       failures on demand
record       counts of requests, and the jobs that ran
server       `Sandbox`: a running sandbox
"""
