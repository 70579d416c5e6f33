#!/bin/bash
# Job: evaluate: seed=1
#
# Runs one try of a job; written by the mantik executor of Snakemake. Needs bash 4.2, coreutils, GNU
# find, GNU tar and gzip. Consists of functions, which the last line calls: bash has read the whole
# file before the first step, so the file may be removed meanwhile.

_m_workspace=/p/scratch/me/flow
_m_try=0b5e5b3e-5f0e-4c1e-9d55-0d3c2a1b4f60
_m_tries=.mantik/tries/12
_m_claim=.mantik/tries/12/0b5e5b3e-5f0e-4c1e-9d55-0d3c2a1b4f60
_m_identity=''
_m_work=.mantik/work/12/0b5e5b3e-5f0e-4c1e-9d55-0d3c2a1b4f60
_m_heartbeat_s=10
_m_grace_s=20
_m_visible_s=5
_m_marker_bytes=1048576
_m_archive_file_bytes=8388608
_m_log_tail_bytes=262144

# Inputs that must exist: size, checksum and path of each. `-` stands for any, `/` for a directory.
# A `+` after the checksum marks an input that the job itself changes.
_m_inputs=()
# Outputs of the job: kind, whether it is a directory, whether an old one is kept, and path of each.
_m_outputs=(
  output no no './results/it'"'"'s ü.txt'
)

_m_site_job=${PWD##*/}
# Do not use HOSTNAME: schedulers pass on that of the login node.
{ read -r _m_host < /proc/sys/kernel/hostname; } 2>/dev/null || _m_host=${HOSTNAME:-unknown}
_m_scheduler_job=${SLURM_JOB_ID:-${PBS_JOBID:-$_m_host.$$}}
_m_signal=          # signal that asked the job to end
_m_deadline=        # end of the grace period, in $SECONDS
_m_group=           # running process group
_m_killed=          # 1 if the group outlived the grace period
_m_code=            # exit code of the payload
_m_cpu=             # user and system time of all processes that were waited for
_m_memory=          # the most memory of all processes on this node, in bytes
_m_failed_step=

_m_say() { printf 'mantik: %s\n' "$*" >&2; }

_m_now() {
  if [ -n "${EPOCHREALTIME-}" ]; then _m_time=${EPOCHREALTIME/,/.}; else _m_time=$(date +%s.%N); fi
}

# ---- signals -------------------------------------------------------------------------------------
# TERM, INT and HUP end the job: its processes get TERM, and KILL after the grace period. USR1 and
# USR2 are warnings of some schedulers to the job: they are passed on once it has started.

_m_pass() { [ -n "$_m_group" ] && kill -s "$1" -- "-$_m_group" 2>/dev/null; }

_m_on_signal() {
  if [ -z "$_m_signal" ]; then
    _m_signal=$1
    _m_deadline=$(( SECONDS + 1 + _m_grace_s ))  # part of this second has already passed
  fi
  _m_pass TERM
}

_m_traps() {
  local name
  for name in TERM INT HUP; do trap "_m_on_signal $name" "$name"; done
  trap '_m_pass USR1' USR1
  trap '_m_pass USR2' USR2
}

# ---- claim ---------------------------------------------------------------------------------------
# Only one start of this try can make the claim, a hard link; all others end. The exit code of `ln`
# is ignored: a repeated NFS call can report a failure to the start that made the link. The claim is
# read instead. A directory in its place means that the try was revoked. Without hard links the
# claim is made with O_EXCL. This is as safe, except on NFS before version 3, but a start that dies
# between making and filling the claim leaves one without an owner.

_m_make_claim() {
  local unique by text owner='' i
  for i in 1 2 3 4; do
    [ -d "$_m_tries" ] && break
    sleep 0.5
  done
  # The controller made the directory before it submitted: it has removed it, and waits no longer.
  [ -d "$_m_tries" ] || return 1
  { read -r unique < /proc/sys/kernel/random/uuid; } 2>/dev/null || unique=$RANDOM$RANDOM$RANDOM
  unique=$unique-${_m_host%%.*}-$$
  by=$_m_claim.by-${unique//[!A-Za-z0-9.-]/_}
  _m_now
  text="owner=$unique
began=$_m_time
site_job=${_m_site_job//$'\n'/ }
scheduler_job=${_m_scheduler_job//$'\n'/ }
identity=$_m_identity
host=${_m_host//$'\n'/ }"
  if printf '%s\n' "$text" > "$by"; then ln -T -- "$by" "$_m_claim" 2>/dev/null; fi
  if [ ! -e "$_m_claim" ]; then
    ( set -C; printf '%s\n' "$text" > "$_m_claim" ) 2>/dev/null
  fi
  for (( i = 0; i < 120; i++ )); do
    if [ -d "$_m_claim" ]; then owner=revoked; break; fi
    owner=
    { IFS= read -r owner < "$_m_claim"; } 2>/dev/null
    case $owner in owner=?*) owner=${owner#owner=}; break ;; esac
    sleep 0.25
  done
  rm -f -- "$by"
  [ "$owner" = "$unique" ] && return 0
  [ -n "$owner" ] && return 1
  _m_say "cannot claim $_m_try in $_m_workspace/$_m_tries: is the file system full or away?"
  exit 75
}

# ---- heartbeat -----------------------------------------------------------------------------------
# Samples the memory of this job on this node, in bytes, and keeps the most in the file `memory`.
# Bash alone reads it: a sample of a job with 10 processes costs about 2 ms. Where Slurm has made a
# control group for the job, the kernel's number counts; else the sum of the resident memory of the
# processes below the script, or the most that one of them ever had, if that is more. What Slurm's
# launcher starts is not below the script: with it and without a control group it is unknown. (Its
# name is written apart: who searches a script for it finds only what uses it.)
_m_sample_memory() {
  local pid line key value file text most=0 sum=0 number=0
  local -a left=("$$") lines=()
  if [ -n "$_m_memory_stat" ] && mapfile -t lines < "$_m_memory_stat"; then
    for line in "${lines[@]}"; do
      key=${line%% *} value=${line##* }
      case $key in anon | shmem | total_rss | total_shmem) (( sum += value )) ;; esac
    done
  else
    while (( ${#left[@]} )); do
      pid=${left[0]} left=("${left[@]:1}")
      [ "$pid" != "$BASHPID" ] && mapfile -t lines < "/proc/$pid/status" || continue
      text=" ${lines[*]} "
      [[ $text != *" Name:"?"s"run" "* ]] && (( number++ < 256 )) || return
      if [[ $text =~ VmHWM:[[:space:]]*([0-9]+) ]]; then
        (( most = BASH_REMATCH[1] > most ? BASH_REMATCH[1] : most ))
      fi
      if [[ $text =~ VmRSS:[[:space:]]*([0-9]+) ]]; then (( sum += BASH_REMATCH[1] )); fi
      for file in "/proc/$pid/task/"[0-9]*/children; do
        read -r -a lines < "$file"
        left+=("${lines[@]}")
      done
    done
    (( sum = (most > sum ? most : sum) * 1024 ))
  fi
  if (( sum > _m_most )); then
    _m_most=$sum
    printf '%s\n' "$sum" > "$_m_work/memory.new" && mv -f -- "$_m_work/memory.new" "$_m_work/memory"
  fi
} 2>/dev/null

# Sets _m_memory_stat to the kernel's account of the job's memory in its control group, if any.
_m_find_group() {
  local line path root
  _m_memory_stat= _m_most=0
  [ -n "${SLURM_JOB_ID-}" ] || return
  while IFS= read -r line; do
    path=${line#*:*:}
    case $line in
      0::*"/job_$SLURM_JOB_ID/"* | *:memory:*"/job_$SLURM_JOB_ID/"*)
        path=${path%%"/job_$SLURM_JOB_ID/"*}/job_$SLURM_JOB_ID
        for root in /sys/fs/cgroup /sys/fs/cgroup/memory; do
          if [ -r "$root$path/memory.stat" ]; then _m_memory_stat=$root$path/memory.stat; fi
        done ;;
    esac
  done < /proc/self/cgroup
} 2>/dev/null

# Appends to the claim while the script runs. Reads from a pipe that only the script holds open: the
# heartbeat ends at once when the script ends or is killed, and leaves no process behind. The first
# samples come sooner: many jobs are short.
_m_heartbeat() {
  local beat=$SECONDS sample=$SECONDS pause=1 next
  trap '' TERM INT HUP USR1 USR2
  _m_find_group
  while :; do
    (( next = beat + _m_heartbeat_s ))
    (( next = sample + pause < next ? sample + pause : next ))
    next=$(( next - SECONDS ))
    read -r -t "$(( next > 0 ? next : 1 ))" _
    (( $? > 128 )) || break
    if (( SECONDS >= beat + _m_heartbeat_s )); then
      beat=$SECONDS
      [ -f "$_m_claim" ] && printf . >> "$_m_claim"
    fi
    if (( SECONDS >= sample + pause )); then
      sample=$SECONDS
      (( pause = 2 * pause < _m_heartbeat_s ? 2 * pause : _m_heartbeat_s ))
      _m_sample_memory
    fi
  done
}
# ---- payload -------------------------------------------------------------------------------------

# Runs a function in a process group of its own and waits for it; sets _m_code.
_m_run() {
  set -m
  "$@" < /dev/null {_m_beat}>&- &
  _m_group=$!
  set +m
  [ -z "$_m_signal" ] || _m_pass TERM
  while :; do
    if [ -z "$_m_signal" ]; then
      wait "$_m_group"
      _m_code=$?
    else
      (( SECONDS < _m_deadline )) || { _m_killed=1; _m_pass KILL; }
      (( SECONDS < _m_deadline + 5 )) || break
      sleep 0.1
    fi
    kill -0 "$_m_group" 2>/dev/null || break
  done
  # If a signal interrupted `wait`, _m_code is the code of the signal; the payload has recorded its
  # own code. Do not call `wait` again: bash may have forgotten a process that ended just as the
  # signal came, and would wait forever (seen with bash 5.2).
  if _m_pass TERM; then _m_leftover=$_m_group; fi
  _m_group=
}

_m_step() {
  _m_at=$1
  printf 'step=%s\n' "$1" >&"$_m_state"
}

_m_fail() {
  local code=$?
  _m_say "$_m_at: $*"
  (( code )) || code=1
  exit "$code"
}

# Checks the code $1 of a user's command. `||` after the command would switch off its `set -e`.
_m_succeeded() {
  (( $1 == 0 )) && return
  ( exit "$1" ) || _m_fail "$2"
}

# Ends the payload, also when a user's command calls exit: records the code, then cleans up.
_m_finish() {
  local code=$?
  trap - EXIT
  trap '' TERM
  set +eu
  if [ "$_m_at" != command ]; then
    (( code )) || code=1
    _m_say "the job was not started: its step '$_m_at' failed with $code"
  elif [ -n "$_m_command_code" ]; then
    code=$_m_command_code
  fi
  printf 'code=%s\n' "$code" >&"$_m_state"
  _m_after 0
  exit "$code"
}

_m_payload() {
  set +m
  umask "$_m_umask"
  _m_at=workspace
  _m_command_code=
  trap _m_finish EXIT
  trap 'exit $(( $? ? $? : 143 ))' TERM
  trap : USR1 USR2
  exec {_m_state}>> "$_m_work/marker/state" || exit 1
  _m_step workspace
  cd -- "$_m_workspace" || _m_fail "there is no workspace $_m_workspace"
  _m_step inputs
  _m_check_inputs
  _m_step outputs
  _m_prepare_outputs
  _m_environment
  set +eu
  _m_step inputs
  _m_check_again
  _m_step command
  # From here on, only the end of the command itself counts.
  trap : TERM
  { : > "$_m_work/begun"; } 2>/dev/null
  # Setup inside the command, such as a rule's own environment, records its failure here.
  export MANTIK_STATE=$_m_home/$_m_work/marker/state
  cd -- "$_m_workspace" && _m_command {_m_state}>&-
  _m_command_code=$?
  exit "$_m_command_code"
}

# Cleans up after a payload that died before it could, for example by a signal or a user's trap.
_m_only_after() {
  set +m
  umask "$_m_umask"
  trap '' TERM
  _m_variables
  _m_after 0
}
# Sets _m_absent to the inputs that are missing or have another size.
_m_find_absent() {
  local i j want path
  local -a paths=() wants=() sizes
  _m_absent=()
  for (( i = 0; i < ${#_m_inputs[@]}; i += 3 )); do
    want=${_m_inputs[i]} path=${_m_inputs[i + 2]}
    case $want in
      /) [ -d "$path" ] || _m_absent+=("$path") ;;
      -) [ -e "$path" ] || _m_absent+=("$path") ;;
      *) if [ -f "$path" ]; then paths+=("$path") wants+=("$want")
         else _m_absent+=("$path"); fi ;;
    esac
  done
  for (( i = 0; i < ${#paths[@]}; i += 500 )); do
    sizes=($(stat -L -c %s -- "${paths[@]:i:500}"))
    for (( j = i; j < ${#paths[@]} && j < i + 500; j++ )); do
      [ "${sizes[j - i]-}" = "${wants[j]}" ] || _m_absent+=("${paths[j]}")
    done
  done
}

# Takes size, checksum and path of each file; sets _m_absent to the paths whose content differs.
_m_find_others() {
  local i j line mark known stamp number
  local -a sums=() small=() lines
  _m_absent=()
  while (( $# )); do
    if (( $1 <= 1048576 )); then
      sums+=("$2") small+=("$3")
    else
      # The job that wrote or fully read it recorded its checksum and stamp.
      mark=.mantik/known/${3#./}.k known=
      stamp=$(_m_stamp_of "$3")
      { IFS= read -r known < "$mark"; } 2>/dev/null
      if [ "$known" != "$2 $stamp" ]; then
        line=$(sha256sum < "$3") || line=
        if [ "${line:0:32}" = "$2" ]; then _m_say_known "$2" "$stamp" "$3"
        else _m_absent+=("$3"); fi
      fi
    fi
    shift 3
  done
  for (( i = 0; i < ${#small[@]}; i += 500 )); do
    lines=()
    while IFS= read -r line; do
      line=${line#\\}
      lines+=("${line:0:32}")
    done < <(sha256sum -- "${small[@]:i:500}")
    number=$(( ${#small[@]} - i < 500 ? ${#small[@]} - i : 500 ))
    # Unreadable files give no line, so lines can no longer be assigned.
    (( ${#lines[@]} == number )) || lines=()
    for (( j = 0; j < number; j++ )); do
      [ "${lines[j]-}" = "${sums[i + j]}" ] || _m_absent+=("${small[i + j]}")
    done
  done
}

# Prints the stamp of a file, which changes whenever the content does.
_m_stamp_of() { stat -L -c '%s %i %.Y %.Z' -- "$1"; }

# Records the checksum $1 of the large file $3, if it still has the stamp $2 from before reading.
_m_say_known() {
  local mark=.mantik/known/${3#./}.k
  [ "$(_m_stamp_of "$3")" = "$2" ] && mkdir -p -- "${mark%/*}" &&
    printf '%s\n' "$1 $2" > "$mark.$_m_try" && mv -f -- "$mark.$_m_try" "$mark"
} 2>/dev/null

# Sets _m_sent to the arguments of `_m_find_others` for the inputs at given indices of _m_inputs.
_m_list_sent() {
  local i
  _m_sent=()
  for i; do
    case ${_m_inputs[i]}${_m_inputs[i + 1]} in
      /* | -* | *-) ;;
      *) _m_sent+=("${_m_inputs[i]}" "${_m_inputs[i + 1]%+}" "${_m_inputs[i + 2]}") ;;
    esac
  done
}

# Waits until all inputs have the submitted content. Another node may just have written them, and
# network file systems show that with a delay.
_m_check_inputs() {
  local i until=$(( SECONDS + _m_visible_s ))
  local -a _m_sent all=()
  for (( i = 0; i < ${#_m_inputs[@]}; i += 3 )); do all+=("$i"); done
  _m_list_sent ${all[@]+"${all[@]}"}
  while :; do
    _m_find_absent
    if (( ! ${#_m_absent[@]} )); then
      _m_find_others ${_m_sent[@]+"${_m_sent[@]}"}
      (( ${#_m_absent[@]} )) || break
      # The sizes have arrived: one more look suffices.
      (( SECONDS + 1 < until )) && until=$(( SECONDS + 1 ))
    fi
    (( SECONDS < until )) || _m_fail_inputs "these inputs are missing or others than were sent"
    sleep 0.5
  done
  _m_inodes > "$_m_work/inodes"
}

# Checks that the inputs are still there: making the environment may have taken long, and a command
# may pass over what is gone, such as a file of a directory.
_m_check_again() {
  local i path IFS=$' \t\n'
  local -A gone=()
  cd -- "$_m_workspace" || _m_fail "there is no workspace $_m_workspace"
  _m_find_absent
  (( ${#_m_absent[@]} )) || return 0
  for path in "${_m_absent[@]}"; do gone[$path]=yes; done
  _m_absent=()
  for (( i = 0; i < ${#_m_inputs[@]}; i += 3 )); do
    path=${_m_inputs[i + 2]}
    [ -n "${gone[$path]+yes}" ] || continue
    case ${_m_inputs[i + 1]} in *+) ;; *) _m_absent+=("$path") ;; esac
  done
  (( ! ${#_m_absent[@]} )) || _m_fail_inputs "these inputs have disappeared or changed since the job started"
}

_m_fail_inputs() {
  printf '%s\0' "${_m_absent[@]#./}" > "$_m_work/marker/missing"
  printf '  %q\n' "${_m_absent[@]#./}" >&2
  _m_fail "$1"
}

# Prints the inode of each input, or `-` if it is missing. A file renamed into the workspace has a
# new inode.
_m_inodes() {
  local i path found
  local -a paths=()
  for (( i = 0; i < ${#_m_inputs[@]}; i += 3 )); do paths+=("${_m_inputs[i + 2]}"); done
  for (( i = 0; i < ${#paths[@]}; i += 500 )); do
    if found=$(stat -L -c %i -- "${paths[@]:i:500}"); then
      printf '%s\n' "$found"
    else
      for path in "${paths[@]:i:500}"; do stat -L -c %i -- "$path" || echo -; done
    fi
  done
} 2>/dev/null

# Sets _m_absent to the inputs whose content another job replaced while the command ran. The job's
# outputs would otherwise be recorded as made from the submitted content.
_m_find_replaced() {
  local i
  local -a before=() now=() replaced=() _m_sent
  _m_absent=()
  [ -s "$_m_work/inodes" ] || return 0
  mapfile -t before < "$_m_work/inodes"
  mapfile -t now < <(_m_inodes)
  for (( i = 0; i < ${#now[@]}; i++ )); do
    # The command itself removed a missing one.
    [ "${now[i]}" = "${before[i]-}" ] || [ "${now[i]}" = - ] && continue
    case ${_m_inputs[3 * i + 1]} in *+) ;; *) replaced+=("$(( 3 * i ))") ;; esac
  done
  (( ${#replaced[@]} )) || return 0
  _m_list_sent "${replaced[@]}"
  _m_find_others ${_m_sent[@]+"${_m_sent[@]}"}
}

_m_prepare_outputs() {
  local i folder path
  local -a files=() trees=() parents=()
  for (( i = 0; i < ${#_m_outputs[@]}; i += 4 )); do
    path=${_m_outputs[i + 3]}
    if [ "${_m_outputs[i + 2]}" = no ] && [[ -e $path || -L $path ]]; then
      if [ "${_m_outputs[i + 1]}" = yes ]; then trees+=("$path"); else files+=("$path"); fi
    fi
  done
  if (( ${#trees[@]} )); then
    printf '%s\0' "${trees[@]}" | xargs -0 rm -rf -- || _m_fail "cannot remove old outputs"
  fi
  if (( ${#files[@]} )); then
    printf '%s\0' "${files[@]}" | xargs -0 rm -f -- || _m_fail "cannot remove old outputs"
  fi
  # Make directories only after all removals: one output may be a directory with another one in it.
  for (( i = 0; i < ${#_m_outputs[@]}; i += 4 )); do
    folder=${_m_outputs[i + 3]%/*}
    [ -z "$folder" ] || [ -d "$folder" ] || parents+=("$folder")
  done
  if (( ${#parents[@]} )); then
    printf '%s\0' "${parents[@]}" | xargs -0 mkdir -p -- ||
      _m_fail "cannot make the directories of the outputs"
  fi
}

# ---- end -----------------------------------------------------------------------------------------

_m_safe_name() {  # fails if the site's file API cannot transfer it; it then goes into the archive
  case $1 in *[!\ -~]* | *[%\'\\\$\`\"]*) return 1 ;; esac
}

# Lists the job's outputs: sets _m_type, _m_size, _m_mode, _m_time, _m_target, _m_path, _m_lacking.
_m_survey() {
  local i kind path folder until=$(( SECONDS + _m_visible_s )) found=$_m_work/marker/found
  local -a there outer=()
  local -A whole=()
  _m_type=() _m_size=() _m_mode=() _m_time=() _m_target=() _m_path=()
  while :; do
    there=() _m_lacking=()
    for (( i = 0; i < ${#_m_outputs[@]}; i += 4 )); do
      kind=${_m_outputs[i]} path=${_m_outputs[i + 3]}
      [ "$_m_code" = 0 ] || [ "$kind" = log ] || continue
      if [ -e "$path" ]; then there+=("$path")
      elif [ "$kind" = output ]; then _m_lacking+=("$path"); fi
    done
    (( ${#_m_lacking[@]} && SECONDS < until )) && [ -z "$_m_signal" ] || break
    sleep 0.5
  done
  : > "$found" || return
  for path in ${there[@]+"${there[@]}"}; do [ ! -d "$path" ] || whole[$path]=yes; done
  # An output inside another one, a directory, is listed with that directory.
  for path in ${there[@]+"${there[@]}"}; do
    folder=$path
    while (( ${#whole[@]} )) && [[ $folder == */* ]]; do
      folder=${folder%/*}
      [ -z "$folder" ] || [ -z "${whole[$folder]+yes}" ] || continue 2
    done
    outer+=("$path")
  done
  for (( i = 0; i < ${#outer[@]}; i += 500 )); do
    find -H "${outer[@]:i:500}" -printf '%y\0%s\0%m\0%T@\0%l\0%p\0' >> "$found" || return
  done
  local type size mode time target
  while IFS= read -r -d '' type && IFS= read -r -d '' size && IFS= read -r -d '' mode &&
    IFS= read -r -d '' time && IFS= read -r -d '' target && IFS= read -r -d '' path; do
    case $type in f | d | l) ;; *) continue ;; esac
    _m_type+=("$type") _m_size+=("$size") _m_mode+=("$mode") _m_time+=("$time")
    _m_target+=("$target") _m_path+=("$path")
  done < "$found"
}

# Sets _m_sum for all files, and records the checksums of large ones. After a success, a signal
# stops this: a late marker is worse than one without checksums.
_m_checksums() {
  local i line
  local -a which=() paths=() lines _m_stamp=()
  _m_sum=()
  for (( i = 0; i < ${#_m_path[@]}; i++ )); do
    [ "${_m_type[i]}" = f ] || continue
    which+=("$i") paths+=("${_m_path[i]}")
    (( _m_size[i] <= 1048576 )) ||
      _m_stamp[i]=$(_m_stamp_of "${_m_path[i]}")
  done
  for (( i = 0; i < ${#paths[@]}; i += 500 )); do
    [ -z "$_m_signal" ] || [ "$_m_code" != 0 ] || return
    # sha256sum prints one line for each file, in order, even for names with newlines.
    lines=()
    while IFS= read -r line; do
      line=${line#\\}
      lines+=("${line%% *}")
    done < <(sha256sum -- "${paths[@]:i:500}")
    (( ${#lines[@]} == ${#paths[@]} - i || ${#lines[@]} == 500 )) || return
    local j
    for (( j = 0; j < ${#lines[@]}; j++ )); do
      line=${which[i + j]}
      _m_sum[line]=${lines[j]}
      (( _m_size[line] <= 1048576 )) ||
        _m_say_known "${lines[j]:0:32}" "${_m_stamp[line]}" "${_m_path[line]}"
    done
  done
}

# Decides where each file goes and writes the lists: into the marker, into the archive, or alone.
_m_sort_out() {
  local level=$1 left=$_m_marker_bytes i place size staging=$_m_work/marker
  [ "$level" = full ] || left=-1
  _m_archived=0
  {
    for (( i = 0; i < ${#_m_path[@]}; i++ )); do
      size=${_m_size[i]}
      if [ "${_m_type[i]}" != f ]; then
        place=none
      elif (( size <= left )); then
        place=marker
        (( left -= size ))
        printf '%s\0' "${_m_path[i]}" >&8
      elif [ "$level" != listed ] &&
        { (( size <= _m_archive_file_bytes )) || ! _m_safe_name "${_m_path[i]}"; }; then
        place=archive
        _m_archived=1
        printf '%s\0' "${_m_path[i]}" >&9
      else
        place=alone
      fi
      printf '%s\0' "$place" "${_m_type[i]}" "$size" "${_m_mode[i]}" "${_m_sum[i]-}" \
        "${_m_target[i]}" "${_m_path[i]#./}"
    done
  } > "$staging/files" 8> "$staging/small" 9> "$staging/larger"
}

_m_make_archive() {
  local archive=$_m_work/outputs.tar line
  _m_archive_size=0 _m_archive_sum=
  (( _m_archived )) || return 0
  tar -cf "$archive" --format=gnu -P -h --hard-dereference --no-recursion --null \
    -T "$_m_work/marker/larger"
  (( $? < 2 )) || return  # 1: a file changed meanwhile; the checksums show it
  _m_archive_size=$(stat -c %s -- "$archive") || return
  line=$(sha256sum -- "$archive") || return
  _m_archive_sum=${line%% *}
}

# ---- undeclared files ----------------------------------------------------------------------------
# Lists files that are new since the command began and are no outputs of the job: in the directories
# of its outputs, and in the first levels of the working directory. Another job that runs at the same
# time may have made some of them. Takes a few seconds at most, and leaves out hidden files and those
# of __pycache__.

# Sets _m_since to the moment at which the command began, as find takes it. It is slightly too early,
# since clocks of file systems tick: the command may have made a file in the same tick.
_m_set_since() {
  _m_since=$(find "$_m_work/begun" -printf %T@) || return
  case ${_m_since#*.} in
    000*) _m_since=$(( ${_m_since%.*} - 1 )).999 ;;
    *) _m_since=${_m_since%.*}.$(printf %.3s "${_m_since#*.}") ;;
  esac
}

# Prints the directories that may hold new files: a new file changes its directory, of which archives
# may set back the time of modification.
_m_changed_directories() {
  local -a search=(-mindepth 1 '(' -name '.*' -o -name __pycache__ ')' -prune
    -o -type d -newerct "@$_m_since" -print0)
  printf '%s\0' "$@"
  timeout 3 find "$@" -maxdepth 3 "${search[@]}"
} 2>/dev/null

# Succeeds if $1 is an input or an output of the job, or lies in one.
_m_is_own() {
  local path=$1
  until [ -n "${own[$path]+yes}" ]; do
    case $path in ?*/*) path=${path%/*} ;; *) return 1 ;; esac
  done
}

_m_find_undeclared() {
  local n=0
  local i path size time mode _m_since
  local -a folders=(.)
  local -A own=() near=([.]=yes)
  : > "$_m_work/marker/new" || return
  [ "$_m_code" = 0 ] && [ -z "$_m_signal" ] && [ -e "$_m_work/begun" ] && _m_set_since || return 0
  for (( i = 2; i < ${#_m_inputs[@]}; i += 3 )); do own[${_m_inputs[i]}]=yes; done
  for (( i = 3; i < ${#_m_outputs[@]}; i += 4 )); do
    own[${_m_outputs[i]}]=yes
    path=${_m_outputs[i]%/*}
    case $path in ./.mantik/up/*/*) ;; ./.* | /*) continue ;; esac
    if [ -z "${near[$path]+yes}" ] && (( ${#near[@]} < 100 )) && [ -d "$path" ]; then
      near[$path]=yes folders+=("$path")
    fi
  done
  near=()
  while IFS= read -r -d '' path; do
    [ -n "${near[$path]+yes}" ] || _m_is_own "$path" || near[$path]=yes
    (( ${#near[@]} < 500 )) || break
  done < <(_m_changed_directories "${folders[@]}")
  (( ${#near[@]} )) || return 0
  while IFS= read -r -d '' size && IFS= read -r -d '' time && IFS= read -r -d '' mode &&
    IFS= read -r -d '' path; do
    ! _m_is_own "$path" || continue
    (( n++ < 500 )) || break
    printf '%s\0' "$size" "$time" "$mode" "${path#./}" >&7 || { : > "$_m_work/marker/new"; break; }
  done 7>> "$_m_work/marker/new" < <(timeout 3 find "${!near[@]}" -mindepth 1 -maxdepth 1 \
    ! -name '.*' -type f -newerct "@$_m_since" -printf '%s\0%T@\0%m\0%p\0' 2>/dev/null)
  return 0
}

_m_write_meta() {
  # A signal after a success does not undo it. One after a failure may be its cause: a scheduler
  # signals one process after the other, and the command may have been the first.
  local by=
  (( _m_code == 0 )) || by=$_m_signal
  printf '%s=%s\n' version 1 try "$_m_try" exit_code "$_m_code" failed_step "$_m_failed_step" \
    signal "$by" started "$_m_started" ended "$_m_ended" host "${_m_host//$'\n'/ }" \
    scheduler_job "${_m_scheduler_job//$'\n'/ }" site_job "${_m_site_job//$'\n'/ }" \
    cpu "$_m_cpu" memory "$_m_memory" \
    "$@" \
    > "$_m_work/marker/meta"
}

# Tries once to write the marker, with the content of level $1.
_m_try_marker() {
  local level=$1 staging=$_m_work/marker new=$_m_tries/.$_m_try.tmp
  local -a what=(meta)
  case $level in
    full | lean | listed)
      _m_sort_out "$level" && _m_make_archive || return
      : > "$staging/lacking" || return
      (( ${#_m_lacking[@]} == 0 )) || printf '%s\0' "${_m_lacking[@]#./}" > "$staging/lacking" || return
      tail -c "$_m_log_tail_bytes" "$_m_work/log" > "$staging/log" || return
      _m_write_meta files "${#_m_path[@]}" lacking "${#_m_lacking[@]}" \
        archive_size "$_m_archive_size" archive_sha256 "$_m_archive_sum" \
        log_bytes "$(stat -c %s -- "$_m_work/log")" || return
      : > "$staging/times" || return
      (( ${#_m_time[@]} == 0 )) || printf '%s\0' "${_m_time[@]}" > "$staging/times" || return
      what=(meta missing lacking files times new log)
      [ -e "$staging/missing" ] || : > "$staging/missing" || return
      [ -e "$staging/new" ] || : > "$staging/new" || return
      tar -czf "$new" --format=gnu -P -h --hard-dereference --no-recursion -C "$_m_home/$staging" \
        "${what[@]}" -C "$_m_home" --null -T "$staging/small" || return ;;
    bare)
      rm -rf -- "$staging" "$_m_work/outputs.tar" "$new"
      mkdir -- "$staging" && _m_write_meta && tar -czf "$new" -C "$staging" meta || return ;;
  esac
  mv -T -- "$new" "$_m_claim.$_m_code"
}

# Writes the marker. Its name alone says how the job ended. If there is no room for its content, it
# holds less: no small outputs (lean), nor an archive beside it (listed), no lists (bare), nothing.
# As a last resort it is a hard link to the claim, which takes no room.
_m_make_marker() {
  local level
  export LC_ALL=C
  trap '' XFSZ
  umask 077
  _m_sum=()
  if _m_survey; then
    _m_find_undeclared
    _m_checksums
    for level in full lean listed; do
      _m_try_marker "$level" && return
      _m_say "cannot write the $level marker"
      rm -f -- "$_m_tries/.$_m_try.tmp" "$_m_work/outputs.tar"
    done
  fi
  _m_try_marker bare && return
  rm -rf -- "$_m_work/marker" "$_m_tries/.$_m_try.tmp"
  : > "$_m_claim.$_m_code" && return
  ln -T -- "$_m_claim" "$_m_claim.$_m_code"
}

_m_read_state() {
  local line
  _m_failed_step=workspace
  while IFS= read -r line; do
    case $line in
      step=*) _m_failed_step=${line#step=} ;;
      code=*) _m_code=${line#code=}; _m_cleaned=1 ;;
    esac
  done < "$_m_work/marker/state"
  [ "$_m_failed_step" != command ] || _m_failed_step=
  # A payload that was replaced by another program (exec) has not run the command. After a signal
  # the code may be unknown; then the signal's code counts.
  if [ -n "$_m_failed_step" ] && [ -z "$_m_signal" ] && (( _m_code == 0 )); then _m_code=1; fi
} 2>/dev/null

_m_main() {
  set +eufC
  _m_traps
  cd -- "$_m_workspace" 2>/dev/null || exit 0
  _m_home=$PWD
  _m_umask=$(umask)
  umask 077
  _m_make_claim || exit 0
  _m_now; _m_started=$_m_time
  printf 'mantik: output goes to %s\n' "$_m_workspace/$_m_work/log"
  mkdir -p -- "$_m_work/marker"
  if : >> "$_m_work/log"; then exec >> "$_m_work/log" 2>&1; else exec > /dev/null 2>&1; fi
  exec {_m_beat}> >(_m_heartbeat > /dev/null 2>&1)
  if [ -z "$_m_signal" ]; then
    _m_cleaned=
    _m_run _m_payload
    _m_read_state
  else
    _m_code=0 _m_cleaned=1 _m_failed_step=workspace
  fi
  if [ -n "$_m_signal" ]; then
    case $_m_signal in HUP) _m_number=129 ;; INT) _m_number=130 ;; *) _m_number=143 ;; esac
    (( _m_code )) && [ -z "$_m_killed" ] || _m_code=$_m_number
    _m_say "the job was asked to end by the signal $_m_signal"
  fi
  _m_now; _m_ended=$_m_time
  if [ -z "$_m_failed_step" ] && [ -z "$_m_signal" ]; then
    _m_find_replaced
    if (( ${#_m_absent[@]} )); then
      printf '%s\0' "${_m_absent[@]#./}" > "$_m_work/marker/missing"
      printf '  %q\n' "${_m_absent[@]#./}" >&2
      _m_say "inputs: these were replaced by others while the command ran"
      _m_failed_step=inputs _m_code=1
    fi
  fi
  # `times` prints the shell's own times in the first line, those of its children in the second.
  { times > "$_m_work/marker/times" && { read -r; read -r _m_cpu; } < "$_m_work/marker/times"; } \
    2>/dev/null
  { read -r _m_memory < "$_m_work/memory"; } 2>/dev/null
  _m_make_marker
  exec {_m_beat}>&-
  if [ -n "${_m_scheduler_output-}" ] && (( ! _m_code )); then rm -f -- "$_m_scheduler_output"; fi
  if [ -n "${_m_leftover-}" ]; then kill -s KILL -- "-$_m_leftover" 2>/dev/null; fi
  exit "$_m_code"
}

# ---- what the user wrote -------------------------------------------------------------------------

_m_variables() {
  export OMP_NUM_THREADS=1 || return
}

_m_environment() {
  _m_step variables
  _m_variables || _m_fail "a variable cannot be set"
  _m_step temporary
  [ -d "${TMPDIR-}" ] || TMPDIR=/tmp
  export TMPDIR TMP="$TMPDIR" TEMPDIR="$TMPDIR" TEMP="$TMPDIR"
}

_m_command() {
  bash -c 'set -euo pipefail; python main.py 1 > '"'"'results/it'"'"'"'"'"'"'"'"'s ü.txt'"'"''
}

# Runs the commands after the job, each even if another one fails. A failure is only reported.
_m_after() {
  return 0
}

_m_main
