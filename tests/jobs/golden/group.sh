#!/bin/bash
# Runs a group of jobs on one node; the library says what these data mean.
_m_name=('split s=1' 'left s=1' serve ask all)
_m_prefix=('[split s=1] ' '[left s=1] ' '[serve] ' '[ask] ' '[all] ')
_m_team=(0 1 2 2 3)
_m_service=(0 0 1 0 0)
_m_followers=('1 2' 3 '' 3 '')
_m_members=(0 1 '2 3' 4)
_m_awaits=(0 1 1 2)
_m_takes=('1 100' '2 100' '2 0' '')
_m_limit=(3 150)
_m_pipes=(./-pipe)
_m_temporary=(./parts/1 ./socket)
_m_readers=('0 1' '2 3')
_m_report=./reports/1
_m_keep_going=yes
_m_service_wait_s=7
_m_member_0() {  # split s=1
  _m_run_member bash 'set -e; ./split '"'"'a b'"'"'' || return
  _m_check_made ./parts/1 || return
}
_m_member_1() {  # left s=1
  export OMP_NUM_THREADS=2 || return
  _m_make_tmpdir "$PWD" /scratch || { _m_say "$_m_reason"; return 1; } || return
  export TMPDIR TEMPDIR="$TMPDIR" TEMP="$TMPDIR" || return
  : > ./bench/left || return
  _m_run_member bash './left 0' ./bench/left ./left.tsv || return
  _m_run_member bash './left 1' ./bench/left ./left.tsv || return
  _m_touch ./done/left || return
}
_m_member_2() {  # serve
  _m_run_member bash ./serve || return
}
_m_member_3() {  # ask
  _m_wait_for_service ./socket || return
  _m_run_member sh ./ask || return
}
_m_member_4() {  # all
  : || return
}
. ./.mantik/lib-CHECKSUM.sh && _m_run_group
