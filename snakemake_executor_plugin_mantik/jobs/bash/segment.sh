# ---- segments ------------------------------------------------------------------------------------
# The job may need more time than its walltime: then it goes on in a next attempt, from its checkpoint.
# Before the walltime ends, programs that handle USR1 get it, then all get TERM. What is left of the
# time is for the checkpoint's checksums. The scheduler's own warning (USR1) counts as well.
# Only a job with `_m_segments`, the number of attempts that it may have, does so.

_m_goes_on_code=85  # by which a command asks to go on in a next segment

_m_set_end() {
  case ${SLURM_JOB_END_TIME-} in
    '' | *[!0-9]*) _m_end=$(( ${_m_started%%[.,]*} + _m_runtime_s )) ;;
    *) _m_end=$SLURM_JOB_END_TIME ;;
  esac
}

# Succeeds when half of the time between the warning and the end is left, or less.
_m_is_time() { [ -n "${_m_end-}" ] && (( $(date +%s%3N) >= _m_end * 1000 - _m_warn_ms / 2 )); }

# Sends USR1 to the script when it is time for the warning, and TERM when half of that time is left.
# Like the heartbeat it ends with the script.
_m_clock() {
  trap '' TERM INT HUP USR1 USR2
  exec {_m_beat}>&-
  local name before=$_m_warn_ms left
  for name in USR1 TERM; do
    left=$(( _m_end * 1000 - before - $(date +%s%3N) ))
    if (( left > 0 )); then
      read -r -t "$(printf '%d.%03d' "$(( left / 1000 ))" "$(( left % 1000 ))")" _
      (( $? > 128 )) || exit 0
    fi
    kill -s "$name" "$$"
    before=$(( before / 2 ))
  done
}

_m_on_warning() {
  [ -n "${_m_segments-}" ] || { _m_pass USR1; return 0; }
  [ -z "$_m_warned" ] || return 0
  _m_warned=1
  _m_grace_s=$(( _m_warn_ms / 4000 ))
  _m_say "the walltime is about to end: the job is to write its checkpoint"
  [ -n "$_m_group" ] || return 0
  _m_find_members
  _m_pass_caught "${_m_members[@]}"
  (( ! ${#_m_sruns[@]} )) || _m_signal_steps USR1
}

# Sends TERM to the running group. srun would kill its steps then: when the walltime is about to
# end, these get the signal instead, and srun ends with them.
_m_ask_to_end() {
  [ -n "$_m_group" ] || return 0
  [ -n "$_m_timed" ] || { _m_pass TERM; return 0; }
  _m_find_members
  _m_pass_term "${_m_members[@]}"
  (( ! ${#_m_sruns[@]} )) || _m_signal_steps TERM
}

# Succeeds while the command runs; that of a segment after a signal also while any of its processes does:
# the shell around it may have ended before the program has saved its state.
_m_goes_on() {
  ! kill -0 "$_m_group" 2>/dev/null || return 0
  [ -n "${_m_segments-}" ] && [ -n "$_m_signal" ] && (( SECONDS < _m_deadline )) && _m_pass 0 && _m_find_members &&
    (( ${#_m_members[@]} + ${#_m_sruns[@]} ))
}

# Sets _m_members to the processes of the running group, except those of srun: these are _m_sruns.
_m_find_members() {
  local path line pid
  local -a field
  _m_members=() _m_sruns=()
  for path in /proc/[0-9]*/stat; do
    line=
    { IFS= read -r -d '' line < "$path"; } 2>/dev/null
    field=(${line##*)})
    [ "${field[2]-}" = "$_m_group" ] && [ "${field[0]}" != Z ] || continue
    pid=${path#/proc/} pid=${pid%/stat}
    case $line in *"(srun) "*) _m_sruns+=("$pid") ;; *) _m_members+=("$pid") ;; esac
  done
}

# Sends USR1 to those of some processes that handle it: it would end all others at once. Apptainer's
# own processes would pass it on to one that may not.
_m_pass_caught() {
  local line pid caught
  for pid; do
    caught=0
    while IFS= read -r line; do
      case $line in
        Name:*starter* | Name:*appinit | Name:*sinit) break ;;
        SigCgt:*) caught=${line##*[[:space:]]} ;;
      esac
    done 2>/dev/null < "/proc/$pid/status"
    (( (16#$caught >> 9) & 1 )) && kill -s USR1 "$pid" 2>/dev/null
  done
}

# Sends TERM to some processes, but not to what ends with the program that it waits for and takes the
# program along if it ends first: Apptainer's own processes, and shells in its containers and in steps.
_m_pass_term() {
  local line pid up
  local -A names=() parents=() waits=() handles=()
  for pid; do
    while IFS= read -r line; do
      case $line in
        Name:*) names[$pid]=${line#Name:?} ;;
        PPid:*) parents[$pid]=${line#PPid:?} waits[${line#PPid:?}]=1 ;;
        SigCgt:*) (( (16#${line##*[[:space:]]} >> 14) & 1 )) && handles[$pid]=1 ;;
      esac
    done 2>/dev/null < "/proc/$pid/status"
  done
  for pid in "${!names[@]}"; do
    case ${names[$pid]} in
      starter* | appinit | sinit) continue ;;
      sh | bash | dash | ksh | zsh)
        if [ -n "${waits[$pid]-}" ] && [ -z "${handles[$pid]-}" ]; then
          [ -z "${_m_in_step-}" ] || continue
          up=$pid
          while [ -n "${names[$up]-}" ]; do
            case ${names[$up]} in starter* | appinit | sinit) continue 2 ;; esac
            up=${parents[$up]}
          done
        fi ;;
    esac
    kill -s TERM "$pid" 2>/dev/null
  done
}

# Sends a signal to the processes of all steps of srun, which are not of the group, on all nodes.
_m_signal_steps() {
  local nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
  (
    exec {_m_beat}>&- {_m_timer}>&-
    timeout "$(( _m_warn_ms / 4000 + 1 ))" srun --overlap --quiet --input=none --nodes="$nodes" \
      --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task=1 --mem=0 \
      bash -c "$(declare -f _m_pass_caught _m_pass_term _m_signal_here); _m_signal_here $1" && exit
    _m_say "the steps of srun cannot be sent $1: a step beside them failed"
    [ "$1" != TERM ] || kill -s TERM "${_m_sruns[@]}" 2>/dev/null
  ) &
}

# Runs in a step of its own on each node, and sends a signal to the processes of all other steps:
# those with a step's variables, and what they have started without these.
_m_signal_here() {
  local path line pid before=-1 _m_in_step=yes
  local -a field files
  local -A found=()
  files=($(grep -lzxFs -e "SLURM_JOB_ID=$SLURM_JOB_ID" /proc/[0-9]*/environ))
  files=($(grep -lzxs -e 'SLURM_STEP_ID=[0-9]*' /dev/null "${files[@]}"))
  files=($(grep -LzxFs -e "SLURM_STEP_ID=$SLURM_STEP_ID" /dev/null "${files[@]}"))
  for path in "${files[@]}"; do
    pid=${path#/proc/} pid=${pid%/environ}
    case $pid in *[!0-9]*) ;; *) found[$pid]=1 ;; esac
  done
  while (( ${#found[@]} > before )); do
    before=${#found[@]}
    for path in /proc/[0-9]*/stat; do
      line=
      { IFS= read -r -d '' line < "$path"; } 2>/dev/null
      field=(${line##*)})
      pid=${path#/proc/} pid=${pid%/stat}
      [ -z "${field[1]-}" ] || [ -z "${found[${field[1]}]-}" ] || found[$pid]=1
    done
  done
  case $1 in
    USR1) _m_pass_caught "${!found[@]}" ;;
    TERM) _m_pass_term "${!found[@]}" ;;
  esac
  return 0
}

# Prints what changes whenever a file of the checkpoint does.
_m_list_checkpoint() {
  local path
  for path in "${_m_checkpoint[@]}"; do
    [ ! -e "$path" ] || find -H "$path" -type f -printf '%s %i %T@ %C@ %p\0'
  done | LC_ALL=C sort -z
}

_m_begin_segment() {
  local path
  for path in "${_m_checkpoint_folders[@]}"; do
    mkdir -p -- "$path" || _m_fail "cannot make $path"
  done
  _m_list_checkpoint > "$_m_work/checkpoint" || _m_fail "cannot list the checkpoint"
  if [ -n "${_m_segment_before-}" ]; then
    # The segment before was ended without a marker: what it had found is all that it left.
    [ -e "$_m_segment_before/checkpoint" ] &&
      ! cmp -s -- "$_m_work/checkpoint" "$_m_segment_before/checkpoint" ||
      _m_fail "the segment before has not changed the checkpoint"
  fi
  export MANTIK_SEGMENT=$_m_segment MANTIK_SEGMENTS=$_m_segments
  export MANTIK_DEADLINE=$_m_end MANTIK_CONTINUE_FILE=$_m_home/$_m_work/continue
}

# Decides whether the job goes on: sets _m_go_on, _m_changed and _m_code.
_m_settle_segment() {
  [ -n "${_m_segments-}" ] || return 0
  [ -z "$_m_failed_step" ] && [ -e "$_m_work/checkpoint" ] || return 0
  if (( _m_code == _m_goes_on_code )) || { (( ! _m_code )) && [ -e "$_m_work/continue" ]; }; then
    _m_go_on=asked
  elif [ -n "$_m_signal" ]; then
    [ -z "$_m_timed" ] || _m_go_on=time_limit
  elif [ -n "$_m_warned" ] && { (( _m_code > 128 )) || { (( ! _m_code )) && _m_lacks_output; }; }; then
    _m_go_on=time_limit
  fi
  [ -n "$_m_go_on$_m_signal" ] || return 0
  _m_list_checkpoint > "$_m_work/checkpoint.now" &&
    ! cmp -s -- "$_m_work/checkpoint" "$_m_work/checkpoint.now" && _m_changed=yes
  [ -n "$_m_go_on" ] || return 0
  if [ "$_m_changed" = yes ]; then _m_code=$_m_goes_on_code
  elif (( _m_code == 0 || _m_code == _m_goes_on_code )); then _m_code=1; fi
}

_m_lacks_output() {
  local i
  for (( i = 0; i < ${#_m_outputs[@]}; i += 3 )); do
    [ "${_m_outputs[i]}" = output ] && [ ! -e "${_m_outputs[i + 2]}" ] && return 0
  done
  return 1
}

