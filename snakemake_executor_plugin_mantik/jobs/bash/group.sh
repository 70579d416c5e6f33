# ---- groups --------------------------------------------------------------------------------------
# Runs a group of jobs on one node. A member starts as soon as the members that it needs have
# succeeded, if the group's limits have room for it. Members that exchange data through pipes, or use a
# service, form a team: they start together. What a member runs is the function `_m_member_N`.
#
# For each member, by number: `_m_name`, `_m_prefix` (its name for sed), `_m_team`, `_m_service` (whether
# it is one), and `_m_followers`, the teams that start only after it has succeeded.
# For each team, by number: `_m_members`, `_m_awaits` (how many other members must succeed first), and
# `_m_takes`, its share of each limit. `_m_limit` are the limits, the first one is CPUs.
# `_m_pipes` are made before the first member starts. The group removes `_m_temporary`, files, when
# the `_m_readers` of each, which make and read it, have succeeded. `_m_report` gets what failed.

# ---- a member, in a process of its own -----------------------------------------------------------

_m_touch() {
  case $1 in */*) mkdir -p -- "${1%/*}" || return ;; esac
  touch -- "$1"
}

_m_wait_for_service() {
  local until=$(( SECONDS + _m_service_wait_s ))
  until [ -e "$1" ]; do
    (( SECONDS < until )) && sleep 0.1 && continue
    _m_say "its service has not made $1 within $_m_service_wait_s s"
    return 1
  done
}

_m_check_made() {
  local path lacking=0
  for path; do
    [ -e "$path" ] || { _m_say "it ended with 0 but did not make ${path#./}"; lacking=1; }
  done
  return "$lacking"
}

# Runs a command of a member, and measures it if two files for that are given.
_m_run_member() {
  local -a start=("$1" -c "$2")
  if [ -n "${3-}" ]; then start=(_m_measured "$3" "$4" "${start[@]}"); fi
  "${start[@]}"
}

_m_be_member() {  # runs a member and reports its end
  # The command itself gets the signal; its exit code counts.
  trap : TERM INT HUP USR1 USR2
  local -a runs=(${MANTIK_MEMBER_RUNS-})
  case ${runs[$1]--} in -) ;; *) export MLFLOW_RUN_ID=${runs[$1]} ;; esac
  unset MANTIK_MEMBER_RUNS MANTIK_MEMBER_ENDS
  _m_member_"$1" < /dev/null 9>&-
  local code=$?
  echo "$1 $code" >&9
  exit "$code"
}

# ---- the group -----------------------------------------------------------------------------------

_m_start_member() {
  local i=$1 out=$_m_scratch/out.$1
  local -a flush=(sed -u)
  ! command -v stdbuf > /dev/null || flush=(stdbuf -oL sed)
  _m_state[i]=running
  (( _m_running += 1 ))
  _m_began[i]=$SECONDS
  _m_say "${_m_name[i]}: starts"
  mkfifo -- "$out" || return
  ( trap '' TERM INT HUP USR1 USR2; LC_ALL=C exec "${flush[@]}" "s/^/${_m_prefix[i]}/" < "$out" ) 9>&- &
  _m_filter[i]=$!
  _m_be_member "$i" > "$out" 2>&1 &
  _m_pid[i]=$!
}

# Sends TERM to a member's shell, as Snakemake does. Processes that it leaves behind are ended after
# it. The shell is stopped while they are listed: otherwise it could start one that is not listed.
_m_end_member() {
  [ "${_m_state[$1]}" = running ] && [ -z "${_m_left[$1]-}" ] || return 0
  local pid line rest
  local -a _m_pids shells=()
  _m_told[$1]=$2
  _m_family "${_m_pid[$1]}" 0
  for pid in "${_m_pids[@]}"; do
    { IFS= read -r line < "/proc/$pid/stat"; } 2>/dev/null || continue
    rest=${line##*) }
    case ${rest#* } in "${_m_pid[$1]} "*) shells+=("$pid") ;; esac
  done
  (( ${#shells[@]} )) || return 0  # it is just starting or ending: the next look retries
  kill -s STOP "${shells[@]}" 2>/dev/null
  _m_family "${_m_pid[$1]}" 0
  kill -s TERM "${shells[@]}" 2>/dev/null
  kill -s CONT "${shells[@]}" 2>/dev/null
  _m_left[$1]=${_m_pids[*]}
  _m_deadline[$1]=$(( SECONDS + _m_grace_s ))
}

_m_account() {  # adds a team's shares to the used ones (+), or subtracts them (-)
  local -a take=(${_m_takes[$1]})
  local j
  for (( j = 0; j < ${#take[@]}; j++ )); do (( _m_used[j] += ${2}1 * take[j] )); done
}

_m_fits() {
  local -a take=(${_m_takes[$1]})
  local j
  for (( j = 0; j < ${#take[@]}; j++ )); do
    (( take[j] == 0 || _m_used[j] + take[j] <= _m_limit[j] )) || return
  done
}

_m_start_team() {
  local i
  unset "_m_ready[$1]"
  _m_account "$1" +
  for i in ${_m_members[$1]}; do _m_start_member "$i" || _m_member_ended "$i" 1; done
}

_m_start_what_can() {
  local team first=
  [ -z "$_m_stop" ] || return
  for team in "${!_m_ready[@]}"; do
    : "${first:=$team}"
    ! _m_fits "$team" || _m_start_team "$team"
    (( _m_used[0] < _m_limit[0] )) || return
  done
  # A team that takes more than the limits runs alone; otherwise it would never start.
  [ -z "$first" ] || (( _m_running )) || _m_start_team "$first"
}

_m_member_ended() {  # handles the end of a member
  local i=$1 code=$2 k team=${_m_team[$1]} left=0 services=0
  [ "${_m_state[i]}" = running ] || return
  (( _m_running -= 1 ))
  wait "${_m_pid[i]}"
  # shellcheck disable=SC2086  # several processes
  [ -z "${_m_left[i]-}" ] || kill -s TERM ${_m_left[i]} 2>/dev/null
  # Do not `wait`: a process that the member left behind may keep its output open forever.
  for (( k = 0; k < _m_last_words_s * 100; k++ )); do
    kill -0 "${_m_filter[i]}" 2>/dev/null || break
    sleep 0.01
  done
  if (( _m_service[i] )) && [ "${_m_told[i]-}" != failed ]; then
    [ -n "${_m_told[i]-}" ] || _m_say "${_m_name[i]}: the service ended by itself, with $code"
    _m_state[i]=succeeded
  elif (( code == 0 )); then
    _m_state[i]=succeeded
    _m_say "${_m_name[i]}: succeeded after $(( SECONDS - _m_began[i] )) s"
  else
    _m_member_failed "$i" "$code"
  fi
  [ "${_m_state[i]}" = failed ] || code=0
  [ -z "${MANTIK_MEMBER_ENDS-}" ] ||
    echo "$i $code $(( SECONDS - _m_began[i] ))" >> "$MANTIK_MEMBER_ENDS"
  if [ "${_m_state[i]}" = succeeded ]; then
    for k in ${_m_followers[i]}; do (( _m_awaits[k] -= 1 )) || _m_ready[k]=$k; done
  fi
  for k in ${_m_members[team]}; do
    [ "${_m_state[i]}" != failed ] || _m_end_member "$k" failed
    [ "${_m_state[k]}" != running ] || if (( _m_service[k] )); then services=1; else left=1; fi
  done
  if (( services && ! left )); then
    for k in ${_m_members[team]}; do (( ! _m_service[k] )) || _m_end_member "$k" 'done'; done
  elif (( ! left )); then
    _m_account "$team" -
  fi
  _m_remove_temporary
}

_m_member_failed() {
  local i=$1 code=$2
  _m_state[i]=failed
  (( _m_first_code )) || _m_first_code=$code
  if [ -n "${_m_told[i]-}" ]; then
    _m_say "${_m_name[i]}: was ended, since what it shares a pipe or service with failed"
  else
    _m_say "${_m_name[i]}: failed with exit code $code after $(( SECONDS - _m_began[i] )) s"
    echo "$i $code" >> "$_m_report"
  fi
  [ "$_m_keep_going" = yes ] || _m_stop=${_m_stop:-failure}
}

# Removes the temporary files whose members have all succeeded; with an argument, all that are left.
_m_remove_temporary() {
  local k i
  for (( k = 0; k < ${#_m_temporary[@]}; k++ )); do
    [ -n "${_m_temporary[k]}" ] || continue
    for i in ${_m_readers[k]}; do
      [ "${_m_state[i]}" = succeeded ] || [ $# -gt 0 ] || continue 2
    done
    rm -rf -- "${_m_temporary[k]}"
    _m_temporary[k]=
  done
}

_m_look_at_members() {  # handles members that did not report their end, and those that do not end
  local i code
  local -a _m_pids
  for (( i = 0; i < ${#_m_team[@]}; i++ )); do
    [ "${_m_state[i]}" = running ] || continue
    if ! kill -0 "${_m_pid[i]}" 2>/dev/null; then
      wait "${_m_pid[i]}"
      code=$?
      _m_member_ended "$i" "$code"
    elif [ -n "${_m_deadline[i]-}" ] && (( SECONDS >= _m_deadline[i] )); then
      _m_family "${_m_pid[i]}" 0
      (( ! ${#_m_pids[@]} )) || kill -s KILL "${_m_pids[@]}" 2>/dev/null
    elif [ -n "${_m_told[i]-}" ]; then
      _m_end_member "$i" "${_m_told[i]}"
    fi
  done
}

_m_prepare_group() {
  local path
  for path in "${_m_pipes[@]}" "${_m_temporary[@]}"; do
    rm -rf -- "$path" || return
    case $path in */*) mkdir -p -- "${path%/*}" || return ;; esac
  done
  for path in "${_m_pipes[@]}"; do mkfifo -- "$path" || return; done
  case $_m_report in */*) mkdir -p -- "${_m_report%/*}" || return ;; esac
  : > "$_m_report"
}

_m_run_group() {
  local i code event
  IFS=$' \t\n'
  set +euf
  # A member that fails before its command counts as a failed member, not as a failed step of the job.
  unset MANTIK_STATE
  _m_in_group=yes
  _m_grace_s=10       # seconds from TERM to KILL
  _m_last_words_s=2   # seconds for the last output of a member
  _m_state=() _m_pid=() _m_filter=() _m_began=() _m_deadline=() _m_told=() _m_left=()
  _m_used=()
  _m_ready=()         # numbers of the teams that can start, in order
  _m_running=0        # number of running members
  _m_first_code=0     # exit code of the first member that failed
  _m_stop=            # why no more members start
  _m_scratch=$(mktemp -d -- "${TMPDIR:-/tmp}/mantik.XXXXXXXX") || exit 1
  trap 'rm -rf -- "$_m_scratch"' EXIT
  trap '_m_stop=signal' TERM INT HUP
  trap : USR1 USR2
  # Members report their end here. Open for reading and writing, the pipe blocks no process.
  mkfifo -- "$_m_scratch/events" && exec 9<> "$_m_scratch/events" || exit 1
  _m_prepare_group || exit 1
  for (( i = 0; i < ${#_m_team[@]}; i++ )); do _m_state[i]=waiting; done
  for (( i = 0; i < ${#_m_members[@]}; i++ )); do (( _m_awaits[i] )) || _m_ready[i]=$i; done
  for (( i = 0; i < ${#_m_limit[@]}; i++ )); do _m_used[i]=0; done
  while :; do
    _m_start_what_can
    (( _m_running )) || break
    event=
    if read -r -t 1 -u 9 event code; then
      _m_member_ended "$event" "$code"
    else
      _m_look_at_members
    fi
  done
  _m_remove_temporary all
  (( ${#_m_pipes[@]} == 0 )) || rm -f -- "${_m_pipes[@]}"
  [ -s "$_m_report" ] || rm -f -- "$_m_report"
  _m_sum_up
  [ "$_m_stop" != signal ] || (( _m_first_code )) || _m_first_code=143
  exit "$_m_first_code"
}

_m_sum_up() {
  local i
  local -A of=()
  for (( i = 0; i < ${#_m_team[@]}; i++ )); do (( of[${_m_state[i]}] += 1 )); done
  [ "${of[succeeded]-0}" = "${#_m_team[@]}" ] && return
  _m_say "of ${#_m_team[@]} members ${of[succeeded]-0} succeeded, ${of[failed]-0} failed and" \
    "${of[waiting]-0} did not start"
}

