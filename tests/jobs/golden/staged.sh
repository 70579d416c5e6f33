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
_m_inputs=(  # size, checksum and path
  17 - ./data.csv
  / - './a b'
  - - ./m.pt
)
_m_outputs=(  # kind, flags and path
  output k ./model/-best.pt
  output d ./plots
  log - ./logs/train.txt
  touched - ./done
)
_m_bundles=(  # to unpack, and what says that they are
  .mantik/bundles/b-17.tar.gz .mantik/bundles/b-17.done
  .mantik/bundles/b-18.tar.gz .mantik/bundles/b-18.done
)
_m_secrets=(TOKEN KEY)
_m_secrets_path=.mantik/secrets/0b5e5b3e-5f0e-4c1e-9d55-0d3c2a1b4f60
_m_variables=(
  OMP_NUM_THREADS '=' 1
)
_m_temporary=(TMP TEMPDIR TEMP)
_m_shell=bash
_m_commands=('set -euo pipefail; python main.py 1 > '"'"'results/it'"'"'"'"'"'"'"'"'s ü.txt'"'"'')
_m_brief=yes
_m_inline() {
  base64 -d <<'_M_INLINE'
AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4
OTo7PD0+P0BBQkNERUZHSElKS0xNTk9QUVJTVFVWV1hZWltcXV5fYGFiY2RlZmdoaWprbG1ub3Bx
cnN0dXZ3eHl6e3x9fn+AgYKDhIWGh4iJiouMjY6PkJGSk5SVlpeYmZqbnJ2en6ChoqOkpaanqKmq
q6ytrq+wsbKztLW2t7i5uru8vb6/wMHCw8TFxsfIycrLzM3Oz9DR0tPU1dbX2Nna29zd3t/g4eLj
5OXm5+jp6uvs7e7v8PHy8/T19vf4+fr7/P3+/w==
_M_INLINE
}

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
