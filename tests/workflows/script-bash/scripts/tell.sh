#!/bin/bash
set -euo pipefail
. "${snakemake[scriptdir]}/lib.sh"
{
  say "${snakemake_input[0]}" "${snakemake_input[named]}" "$PREFIXED"
  cat "${snakemake_input[0]}" "${snakemake_input[named]}"
  say "${snakemake_params[text]}" "${snakemake_params[several]}" "${snakemake_params[number]}"
  say "${snakemake[threads]}" "${snakemake[rule]}" "${snakemake_resources[mem_mb]}"
  if [ "${snakemake_resources[tmpdir]}" = "$TMPDIR" ]; then say "its directory"; fi
  cat
} > "${snakemake_output[0]}" 2> "${snakemake_log[0]}"
