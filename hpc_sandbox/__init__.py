"""Sites on this machine that speak UNICORE or firecREST v2 and run jobs as processes or in Slurm.

`server` runs sites. `site` is what both APIs share. UNICORE is `unicore` (routes), `access`,
`job_resources` and `jobs`, `description` and `scripts`, `files`, `server_transfers` and `tsi`;
`firecrest` is a package of its own. Jobs run in one of two schedulers with the interface `batch`:
`scheduler`, which reads scripts with `sbatch` and ends `processes`, or `slurm`. `faults` makes
requests fail.
"""
