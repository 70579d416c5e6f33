# ---- signals -------------------------------------------------------------------------------------
# TERM, INT and HUP end the job: its processes get TERM, and KILL after the grace period. USR1 and
# USR2 are warnings of some schedulers to the job: they are passed on once it has started.

_m_pass() { [ -n "$_m_group" ] && kill -s "$1" -- "-$_m_group" 2>/dev/null; }

_m_on_signal() {
  if [ -z "$_m_signal" ]; then
    _m_signal=$1
    _m_deadline=$(( SECONDS + 1 + _m_grace_s ))  # part of this second has already passed
    _m_is_time && _m_timed=1
  fi
  _m_ask_to_end
}

_m_traps() {
  local name
  for name in TERM INT HUP; do trap "_m_on_signal $name" "$name"; done
  trap _m_on_warning USR1
  trap '_m_pass USR2' USR2
}

# ---- payload -------------------------------------------------------------------------------------

# Runs a function in a process group of its own and waits for it; sets _m_code.
_m_run() {
  set -m
  "$@" < /dev/null {_m_beat}>&- {_m_timer}>&- &
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
    _m_goes_on || break
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
  trap '' TERM INT HUP USR1 USR2
  set +eu
  if [ "$_m_at" != command ]; then
    (( code )) || code=1
    _m_say "the job was not started: its step '$_m_at' failed with $code"
  elif [ -n "$_m_command_code" ]; then
    code=$_m_command_code
  fi
  printf 'code=%s\n' "$code" >&"$_m_state"
  _m_run_after
  exit "$code"
}

# Makes the links to the directories above the workspace, by which files that lie there have paths in
# it: `_m_ups` are their names.
_m_link_up() {
  local up target=../..
  (( ${#_m_ups[@]} )) || return 0
  [ -d .mantik/up ] || mkdir -p .mantik/up || _m_fail "cannot make .mantik/up"
  for up in "${_m_ups[@]}"; do
    target+=/..
    [ -L ".mantik/up/$up" ] || ln -sT "$target" ".mantik/up/$up" 2>/dev/null ||
      [ -L ".mantik/up/$up" ] || _m_fail "cannot make the link .mantik/up/$up"
  done
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
  _m_link_up
  if (( ${#_m_predecessors[@]} )); then
    _m_step predecessors
    _m_check_predecessors
  fi
  if (( ${#_m_secrets[@]} )); then
    _m_step secrets
    _m_read_secrets
  fi
  _m_step bundles
  _m_unpack
  _m_step inputs
  _m_check_inputs
  _m_step outputs
  _m_prepare_outputs
  if [ -n "${_m_segments-}" ]; then
    _m_step checkpoint
    _m_begin_segment
  fi
  [ -z "${_m_live-}" ] || _m_begin_live
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
  trap '' TERM INT HUP USR1 USR2
  _m_export_variables
  _m_run_after
}

_m_read_secrets() {
  local name
  [ -r "./$_m_secrets_path" ] || _m_fail "the file of secrets is not there"
  set -a
  . "./$_m_secrets_path" || _m_fail "the file of secrets cannot be read"
  set +a
  rm -f -- "./$_m_secrets_path" || _m_fail "the file of secrets cannot be removed"
  for name in "${_m_secrets[@]}"; do
    [ -n "${!name+set}" ] || _m_fail "the file of secrets does not set $name"
  done
}

# ---- the attempt -------------------------------------------------------------------------------------

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
  _m_signal=          # signal that asked the job to end
  _m_deadline=        # end of the grace period, in $SECONDS
  _m_group=           # running process group
  _m_killed=          # 1 if the group outlived the grace period
  _m_leftover=        # process group that did not end with its first process
  _m_code=            # exit code of the payload
  _m_failed_step=
  _m_cpu=             # user and system time of all processes that were waited for
  _m_memory=          # the most memory of all processes on this node, in bytes
  _m_warned=          # 1 after the warning that the walltime is about to end
  _m_timed=           # 1 if a signal ended the job because its time was over
  _m_go_on=           # why the job goes on in another segment
  _m_changed=no       # whether its checkpoint has changed
  # Do not use HOSTNAME: schedulers pass on that of the login node.
  { read -r _m_host < /proc/sys/kernel/hostname; } 2>/dev/null || _m_host=${HOSTNAME:-unknown}
  _m_scheduler_job=${SLURM_JOB_ID:-${PBS_JOBID:-$_m_host.$$}}
  _m_traps
  _m_home=$PWD _m_scratch=$_m_work/marker
  : "${_m_umask:=$(umask)}"
  umask "$_m_own_umask"
  (( ! ${#_m_lists[@]} )) || _m_read_lists || {
    _m_say "${_m_lists[*]} in $_m_workspace: missing or damaged: the job did not start"
    exit 0
  }
  _m_make_claim || exit 0
  # After the claim: whoever takes the place over writes its lease first, and then lists the claims.
  _m_is_known || { rm -f -- "$_m_claim"; exit 0; }
  _m_now; _m_started=$_m_time
  printf 'mantik: output goes to %s\n' "$_m_workspace/$_m_work/log"
  mkdir -p -- "$_m_work/marker"
  if : >> "$_m_work/log"; then exec >> "$_m_work/log" 2>&1; else exec > /dev/null 2>&1; fi
  exec {_m_beat}> >(_m_heartbeat > /dev/null 2>&1)
  if [ -n "${_m_segments-}" ]; then
    _m_set_end
    exec {_m_timer}> >(_m_clock > /dev/null 2>&1)
  else
    exec {_m_timer}> /dev/null
  fi
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
  exec {_m_timer}>&-
  _m_settle_segment
  if (( ${#_m_after[@]} )) && [ -z "$_m_cleaned" ] && [ -z "$_m_killed" ]; then
    _m_real_code=$_m_code
    _m_run _m_only_after
    _m_code=$_m_real_code
  fi
  _m_now; _m_ended=$_m_time
  if [ -z "$_m_failed_step" ] && [ -z "$_m_signal" ]; then
    (( ! ${#_m_predecessors[@]} )) || _m_add_made
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
  [ -z "${_m_gpus_wanted-}" ] || _m_settle_gpus
  (( ! ${#_m_secrets[@]} )) || [ ! -e "./$_m_secrets_path" ] || rm -f -- "./$_m_secrets_path"
  [ -z "${_m_live-}" ] || _m_drop_untouched
  _m_make_marker
  exec {_m_beat}>&-
  # What was shown while it ran: the job's outputs include all of it.
  [ -z "${_m_live-}" ] || rm -rf -- "$_m_claim.live" "$_m_work/live" 2>/dev/null
  if [ -n "${_m_scheduler_output-}" ] && (( ! _m_code )); then rm -f -- "$_m_scheduler_output"; fi
  [ -z "$_m_leftover" ] || kill -s KILL -- "-$_m_leftover" 2>/dev/null
  # A command that follows on the login node runs only after a success.
  [ -z "${_m_always_zero-}" ] || exit 0
  exit "$_m_code"
}
