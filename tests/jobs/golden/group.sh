#!/bin/bash
# Runs a group of jobs on one node. A member starts as soon as the members that it needs have
# succeeded, if the group's limits have room for it. Needs bash 4.2, coreutils, sed.
#
# Members that exchange data through pipes, or use a service, form a team: they start together.

# A member that fails before its command counts as a failed member, not as a failed step of the job.
unset MANTIK_STATE

# For each member, by number: name, name as a prefix for sed, team, whether it is a service.
_m_name=('split s=1' 'left s=1' serve ask all)
_m_prefix=('[split s=1] ' '[left s=1] ' '[serve] ' '[ask] ' '[all] ')
_m_team=(0 1 2 2 3)
_m_service=(0 0 1 0 0)
# For each member, by number: the teams that start only after it has succeeded.
_m_followers=('1 2' 3 '' 3 '')
# For each team, by number: its members, how many other members must succeed first, and its share of
# each limit. The first limit is CPUs.
_m_members=(0 1 '2 3' 4)
_m_awaits=(0 1 1 2)
_m_takes=('1 100' '2 100' '2 0' '')
_m_limit=(3 150)
# Pipes, made before the first member starts.
_m_pipes=(./-pipe)
# Temporary files, which the group removes, and the members that make and read each of them.
_m_temporary=(./parts/1 ./socket)
_m_readers=('0 1' '2 3')
_m_report=./reports/1
_m_keep_going=yes
# Seconds: until the service must exist; from TERM to KILL; for the last output of a member.
_m_service_wait_s=7
_m_grace_s=10
_m_last_words_s=2

_m_state=() _m_pid=() _m_filter=() _m_began=() _m_deadline=() _m_told=() _m_left=()
_m_used=()
_m_ready=()         # numbers of the teams that can start, in order
_m_running=0        # number of running members
_m_first_code=0     # exit code of the first member that failed
_m_stop=            # why no more members start

_m_say() { printf 'mantik: %s\n' "$*" >&2; }

_m_now() {
  if [ -n "${EPOCHREALTIME-}" ]; then _m_time=${EPOCHREALTIME/,/.}; else _m_time=$(date +%s.%N); fi
}

# Sets _m_pids to the processes below $1, without $2 and those below it.
_m_family() {
  local line pid rest more=1
  local -A parent=() inside=()
  local -a lines
  _m_pids=()
  mapfile -t lines < <(cat /proc/[0-9]*/stat)
  for line in "${lines[@]}"; do
    pid=${line%% *} rest=${line##*) }
    rest=${rest#* }
    case $pid in '' | *[!0-9]*) ;; *) parent[$pid]=${rest%% *} ;; esac
  done
  inside[$1]=1
  while (( more )); do
    more=0
    for pid in "${!parent[@]}"; do
      if [ -z "${inside[$pid]-}" ] && [ "$pid" != "$2" ] && [ -n "${inside[${parent[$pid]}]-}" ]; then
        inside[$pid]=1 more=1
      fi
    done
  done
  unset "inside[$1]"
  _m_pids=("${!inside[@]}")
}
# ---- benchmark -----------------------------------------------------------------------------------
# Measures the figures of Snakemake's `benchmark:` with /proc, which every Linux has. Writes a line
# per run of the command: its start and end in seconds. If it could be sampled, these follow: the
# greatest rss, vms, uss and pss, the bytes read and written, the CPU ticks used, and the ticks per
# second. Needs `family.sh.j2`, `_m_now`, and the directory $_m_scratch for the latest figures.

# Samples the processes below $1 until it is killed; writes the latest figures to the file $2.
_m_sample() {
  local pid line rest key value n=0 page hz rss vms uss pss in out used
  local max_rss=0 max_vms=0 max_uss=0 max_pss=0
  local -A ticks=()
  local -a field lines=() io=()
  local IFS=$' \t\n'
  set +f
  page=$(getconf PAGESIZE) hz=$(getconf CLK_TCK)
  while :; do
    rss=0 vms=0 uss=0 pss=0 in=0 out=0 used=0
    _m_family "$1" "$BASHPID"
    for pid in "${_m_pids[@]}"; do
      { IFS= read -r line < "/proc/$pid/stat"; } 2>/dev/null || continue
      rest=${line##*) }
      read -r -a field <<< "$rest"
      ticks[$pid]=$(( field[11] + field[12] ))
      (( vms += field[20], rss += field[21] * page ))
      # Read each file as a whole: its content changes between reads.
      { mapfile -t lines < "/proc/$pid/smaps_rollup"; mapfile -t io < "/proc/$pid/io"; }
      for line in "${lines[@]}" "${io[@]}"; do
        read -r key value rest <<< "$line"
        case $key in
          Pss:) (( pss += value * 1024 )) ;;
          Private_*) (( uss += value * 1024 )) ;;
          read_bytes:) (( in += value )) ;;
          write_bytes:) (( out += value )) ;;
        esac
      done
      lines=() io=()
    done
    if (( ${#_m_pids[@]} )); then
      (( max_rss = rss > max_rss ? rss : max_rss, max_vms = vms > max_vms ? vms : max_vms ))
      (( max_uss = uss > max_uss ? uss : max_uss, max_pss = pss > max_pss ? pss : max_pss ))
      for pid in "${!ticks[@]}"; do (( used += ticks[$pid] )); done
      echo "$max_rss $max_vms $max_uss $max_pss $in $out $used $hz" > "$2"
    fi
    # As often as Snakemake does: this distinguishes short jobs and does not disturb long ones.
    (( n++ < 30 )) && sleep 0.5 || sleep 30
  done 2>/dev/null
}

# Prints $1 hundredths.
_m_hundredths() { printf '%d.%02d' $(( $1 / 100 )) $(( $1 % 100 )); }

# Writes the benchmark file $2 from the measurements $1 for later commands here that look at it, as
# Snakemake does on the user's machine: a table, or lines of JSON.
_m_write_benchmark() {
  local IFS=$' \t\n' begin end ms n text
  local -a figures values names=(s h:m:s max_rss max_vms max_uss max_pss io_in io_out mean_load cpu_time)
  case $2 in */*) mkdir -p -- "${2%/*}" || return ;; esac
  rm -f -- "$2"
  {
    [[ $2 == *.jsonl ]] || { printf -v text '%s\t' "${names[@]}"; echo "${text%?}"; }
    while read -r begin end n; do
      ms=${end#*.} text=${begin#*.}
      ms=$(( (${end%.*} - ${begin%.*}) * 1000 + 10#${ms:0:3} - 10#${text:0:3} ))
      printf -v text '%d:%02d:%02d' $(( ms / 3600000 )) $(( ms / 60000 % 60 )) $(( ms / 1000 % 60 ))
      values=("$(_m_hundredths $(( ms / 10 )))" "$text")
      read -r -a figures <<< "$n"
      for n in {0..5}; do
        values+=("${figures[n]+"$(_m_hundredths $(( figures[n] * 100 / 1048576 )))"}")
      done
      if (( ${#figures[@]} )); then
        n=$(( figures[6] * 100 / figures[7] ))
        values+=("$(_m_hundredths $(( n * 100000 / (ms > 0 ? ms : 1) )))" "$(_m_hundredths "$n")")
      fi
      text=
      for n in "${!names[@]}"; do
        if [[ $2 != *.jsonl ]]; then text+=$'\t'${values[n]:-NA}
        elif [[ ${values[n]-} == *[0-9] && $n != 1 ]]; then text+=", \"${names[n]}\": ${values[n]}"
        else text+=", \"${names[n]}\": \"${values[n]:-NA}\""; fi
      done
      if [[ $2 == *.jsonl ]]; then echo "{${text#, }}"; else echo "${text#?}"; fi
    done < "$1"
  } > "$2"
}

# Runs the command given by the arguments after the second, appends a line to the file $1, and writes
# the benchmark file $2 anew. Returns the exit code of the command.
_m_measured() {
  local code sampler begin file=$1 target=$2 self=$BASHPID sample=$_m_scratch/sample.$BASHPID
  shift 2
  rm -f -- "$sample"
  _m_now; begin=$_m_time
  _m_sample "$self" "$sample" > /dev/null &
  sampler=$!
  "$@"
  code=$?
  _m_now
  { kill -s KILL "$sampler" && wait "$sampler"; } 2>/dev/null
  {
    printf '%s %s ' "$begin" "$_m_time"
    if [ -s "$sample" ]; then cat -- "$sample"; else echo; fi
  } >> "$file"
  [ "$code" != 0 ] || _m_write_benchmark "$file" "$target" || echo "mantik: cannot write $target" >&2
  return "$code"
}

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

_m_made() {
  local path lacking=0
  for path; do
    [ -e "$path" ] || { _m_say "it ended with 0 but did not make ${path#./}"; lacking=1; }
  done
  return "$lacking"
}

_m_member_0() {  # split s=1
  bash -c 'set -e; ./split '"'"'a b'"'"'' || return
  _m_made ./parts/1
}
_m_member_1() {  # left s=1
  export OMP_NUM_THREADS=2 || return
  [ -d "${TMPDIR-}" ] || TMPDIR=/tmp
  TMPDIR='/scratch'
  case $TMPDIR in (/*) ;; (*) TMPDIR="$PWD"/$TMPDIR ;; esac
  mkdir -p -- "$TMPDIR" || { _m_say "the directory $TMPDIR of the resource tmpdir cannot be made on this node"; return 1; }
  export TMPDIR TEMPDIR="$TMPDIR" TEMP="$TMPDIR"
  : > ./bench/left || return
  _m_measured ./bench/left ./left.tsv bash -c './left 0' || return
  _m_measured ./bench/left ./left.tsv bash -c './left 1' || return
  _m_touch ./done/left || return
}
_m_member_2() {  # serve
  bash -c ./serve || return
}
_m_member_3() {  # ask
  _m_wait_for_service ./socket || return
  sh -c ./ask || return
}
_m_member_4() {  # all
  :  # the member runs nothing
}
_m_alone() {  # runs a member and reports its end
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

_m_start() {
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
  _m_alone "$i" > "$out" 2>&1 &
  _m_pid[i]=$!
}

# Sends TERM to a member's shell, as Snakemake does. Processes that it leaves behind are ended after
# it. The shell is stopped while they are listed: otherwise it could start one that is not listed.
_m_end() {
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

_m_kill() {  # kills all processes that a member has started
  local -a _m_pids
  _m_family "${_m_pid[$1]}" 0
  (( ${#_m_pids[@]} == 0 )) || kill -s KILL "${_m_pids[@]}" 2>/dev/null
}

_m_account() {  # adds a team's shares to the used ones (+), or subtracts them (-)
  local -a take=(${_m_takes[$1]})
  local j
  for (( j = 0; j < ${#take[@]}; j++ )); do (( _m_used[j] += $2 take[j] )); done
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
  for i in ${_m_members[$1]}; do _m_start "$i" || _m_over "$i" 1; done
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

_m_over() {  # handles the end of a member
  local i=$1 code=$2 k team=${_m_team[$1]} left=0 services=0
  [ "${_m_state[i]}" = running ] || return
  (( _m_running -= 1 ))
  wait "${_m_pid[i]}"
  [ -z "${_m_left[i]-}" ] || kill -s TERM ${_m_left[i]} 2>/dev/null
  # Do not `wait`: a process that the member left behind may keep its output open forever.
  for (( k = 0; k < _m_last_words_s * 100; k++ )); do
    kill -0 "${_m_filter[i]}" 2>/dev/null || break
    read -r -t 0.01 _ <> "$_m_scratch/never"
  done
  if (( _m_service[i] )) && [ "${_m_told[i]-}" != failed ]; then
    [ -n "${_m_told[i]-}" ] || _m_say "${_m_name[i]}: the service ended by itself, with $code"
    _m_state[i]=succeeded
  elif (( code == 0 )); then
    _m_state[i]=succeeded
    _m_say "${_m_name[i]}: succeeded after $(( SECONDS - _m_began[i] )) s"
  else
    _m_failed "$i" "$code"
  fi
  [ "${_m_state[i]}" = failed ] || code=0
  [ -z "${MANTIK_MEMBER_ENDS-}" ] ||
    echo "$i $code $(( SECONDS - _m_began[i] ))" >> "$MANTIK_MEMBER_ENDS"
  if [ "${_m_state[i]}" = succeeded ]; then
    for k in ${_m_followers[i]}; do (( _m_awaits[k] -= 1 )) || _m_ready[k]=$k; done
  fi
  for k in ${_m_members[team]}; do
    [ "${_m_state[i]}" != failed ] || _m_end "$k" failed
    [ "${_m_state[k]}" != running ] || if (( _m_service[k] )); then services=1; else left=1; fi
  done
  if (( services && ! left )); then
    for k in ${_m_members[team]}; do (( ! _m_service[k] )) || _m_end "$k" done; done
  elif (( ! left )); then
    _m_account "$team" -
  fi
  _m_remove_temporary
}

_m_failed() {
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

_m_look() {  # handles members that did not report their end, and those that do not end
  local i code
  for (( i = 0; i < ${#_m_team[@]}; i++ )); do
    [ "${_m_state[i]}" = running ] || continue
    if ! kill -0 "${_m_pid[i]}" 2>/dev/null; then
      wait "${_m_pid[i]}"
      code=$?
      _m_over "$i" "$code"
    elif [ -n "${_m_deadline[i]-}" ] && (( SECONDS >= _m_deadline[i] )); then
      _m_kill "$i"
    elif [ -n "${_m_told[i]-}" ]; then
      _m_end "$i" "${_m_told[i]}"
    fi
  done
}

_m_prepare() {
  local path
  for path in "${_m_pipes[@]}" "${_m_temporary[@]}"; do
    rm -rf -- "$path" || return
    case $path in */*) mkdir -p -- "${path%/*}" || return ;; esac
  done
  for path in "${_m_pipes[@]}"; do mkfifo -- "$path" || return; done
  case $_m_report in */*) mkdir -p -- "${_m_report%/*}" || return ;; esac
  : > "$_m_report"
}

_m_main() {
  local i code event
  IFS=$' \t\n'
  set +euf
  _m_scratch=$(mktemp -d -- "${TMPDIR:-/tmp}/mantik.XXXXXXXX") || exit 1
  trap 'rm -rf -- "$_m_scratch"' EXIT
  trap '_m_stop=signal' TERM INT HUP
  trap : USR1 USR2
  # Members report their end here. Open for reading and writing, the pipe blocks no process.
  mkfifo -- "$_m_scratch/events" "$_m_scratch/never" && exec 9<> "$_m_scratch/events" || exit 1
  _m_prepare || exit 1
  for (( i = 0; i < ${#_m_team[@]}; i++ )); do _m_state[i]=waiting; done
  for (( i = 0; i < ${#_m_members[@]}; i++ )); do (( _m_awaits[i] )) || _m_ready[i]=$i; done
  for (( i = 0; i < ${#_m_limit[@]}; i++ )); do _m_used[i]=0; done
  while :; do
    _m_start_what_can
    (( _m_running )) || break
    event=
    if read -r -t 1 -u 9 event code; then
      _m_over "$event" "$code"
    else
      _m_look
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

_m_main
