#!/bin/bash
# Job: evaluate: seed=1
#
# Runs one attempt of a job for the mantik executor of Snakemake. What follows is its data; what all
# jobs do is in the library in the workspace that the last lines read.

_m_workspace=/p/scratch/me/flow
_m_attempt=0b5e5b3e-5f0e-4c1e-9d55-0d3c2a1b4f60
_m_attempts=.mantik/attempts/12
_m_claim=.mantik/attempts/12/0b5e5b3e-5f0e-4c1e-9d55-0d3c2a1b4f60
_m_work=.mantik/work/12/0b5e5b3e-5f0e-4c1e-9d55-0d3c2a1b4f60
_m_identity=
_m_term=0
_m_own_umask=077
_m_heartbeat_s=10 _m_grace_s=20 _m_visible_s=5
_m_marker_bytes=1048576 _m_archive_file_bytes=8388608 _m_log_tail_bytes=262144
_m_outputs=(  # kind, flags and path
  output - './results/it'"'"'s ü.txt'
)
_m_variables=(
  OMP_NUM_THREADS '=' 1
)
_m_temporary=(TMP TEMPDIR TEMP)
_m_shell=bash
_m_commands=('set -euo pipefail; python main.py 1 > '"'"'results/it'"'"'"'"'"'"'"'"'s ü.txt'"'"'')
_m_brief=yes

_m_site_job=${_m_pooled:-${PWD##*/}}
_m_library=.mantik/lib-CHECKSUM.sh
_m_whole() { [[ $(sha256sum $_m_library 2> /dev/null) == CHECKSUM* ]] && _m_found=yes; }
cd -- "$_m_workspace" && until _m_whole || (( SECONDS >= _m_visible_s )); do sleep 0.2; done
if [ "${_m_found-}" ] && . ./$_m_library; then
  _m_main
  exit 1
fi
echo "mantik: no whole $_m_library in $_m_workspace: the job did not start" >&2
exit 0  # the workspace was purged: the job is submitted again
