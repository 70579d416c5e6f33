# ---- the command and its environment -------------------------------------------------------------

# Exports the variables. `_m_variables` has, for each of them, its name, `=` or `eval`, and its value or
# the assignment for `eval`, in which bash expands the value.
_m_export_variables() {
  local _m_i
  for (( _m_i = 0; _m_i < ${#_m_variables[@]}; _m_i += 3 )); do
    if [ "${_m_variables[_m_i + 1]}" = eval ]; then
      eval "${_m_variables[_m_i + 2]}" && export "${_m_variables[_m_i]?}" || return
    else
      export "${_m_variables[_m_i]}=${_m_variables[_m_i + 2]}" || return
    fi
  done
}

# Loads the modules and sets the variables again that these have changed, unless a module extended
# one, which is a path, at either end.
_m_load_environment_modules() {
  local _m_i _m_name _m_value
  local -a _m_values=()
  for (( _m_i = 0; _m_i < ${#_m_variables[@]}; _m_i += 3 )); do
    _m_name=${_m_variables[_m_i]}
    _m_values+=("${!_m_name}")
  done
  _m_step modules
  _m_find_module ||
    _m_fail "there is no command 'module' on this node: load none, or define it in BASH_ENV"
  module load "${_m_modules[@]}" || _m_fail "not all modules could be loaded: ${_m_modules[*]}"
  for (( _m_i = 0; _m_i < ${#_m_values[@]}; _m_i++ )); do
    _m_name=${_m_variables[3 * _m_i]} _m_value=${_m_values[_m_i]}
    [ -n "$_m_value" ] && [[ ":${!_m_name-}:" == *":$_m_value:"* ]] ||
      export "$_m_name=$_m_value"
  done
}

_m_environment() {
  local _m_i
  _m_step variables
  _m_export_variables || _m_fail "a variable cannot be set"
  (( ! ${#_m_modules[@]} )) || _m_load_environment_modules
  for (( _m_i = 0; _m_i < ${#_m_before[@]}; _m_i++ )); do
    _m_step before
    eval "${_m_before[_m_i]}"
    _m_succeeded $? "command $(( _m_i + 1 )) of PreRunCommandOnComputeNode failed"
  done
  set +eu  # what a command may have set
  if [ -n "${_m_python-}${_m_python_code-}" ]; then
    _m_step python
    eval "${_m_python_code-}" || _m_fail "the path of the virtual environment cannot be expanded"
    [ -n "${_m_plugin-}" ] || _m_activate_python
  fi
  _m_step temporary
  [ -d "${TMPDIR-}" ] || TMPDIR=/tmp
  if (( ${#_m_tmpdir[@]} )); then
    _m_make_tmpdir "$_m_workspace" "${_m_tmpdir[@]}" || _m_fail "$_m_reason"
  fi
  export TMPDIR
  for _m_i in "${_m_temporary[@]}"; do export "$_m_i=$TMPDIR"; done
  if [ -n "${_m_mounts-}" ]; then
    export APPTAINER_MOUNT=${APPTAINER_MOUNT:+$APPTAINER_MOUNT$'\n'}$_m_mounts
  fi
  [ -z "${_m_image-}${_m_image_code-}" ] || _m_prepare_image
  if [ -n "${_m_plugin-}" ]; then
    _m_step container
    [ -n "${SLURM_JOB_ID-}" ] && command -v srun > /dev/null ||
      _m_fail "there is no srun here, which starts the container"
    [ -z "${_m_container_file-}" ] || [ -r "$_m_container_file" ] ||
      _m_fail "there is no file $_m_container_file"
  fi
}

_m_activate_python() {
  if (( ${#_m_requirements[@]} )); then
    cd -- "$_m_workspace" && _m_python=$(
      _m_who='Environment: Python'
      _m_make_venv "$_m_python_name" "$_m_python" . '' packages "${_m_requirements[@]}"
    ) || _m_fail "the virtual environment could not be made"
  fi
  . "$_m_python/bin/activate" || _m_fail "there is no virtual environment $_m_python"
}

_m_prepare_image() {
  _m_step image
  command -v apptainer > /dev/null || _m_fail "there is no Apptainer on this node"
  eval "${_m_image_code-}" || _m_fail "the path of the image cannot be expanded"
  case $_m_image in
    *://*) ;;
    *) [ -e "$_m_image" ] || _m_fail "there is no image $_m_image" ;;
  esac
  _m_bindable "$_m_workspace"
  APPTAINER_BIND=${APPTAINER_BIND:+$APPTAINER_BIND,}$_m_bound
  if (( ${#_m_tmpdir[@]} )); then
    case $TMPDIR in (*[\\,:]*) ;; (*) APPTAINER_BIND+=,$TMPDIR ;; esac
  fi
  export APPTAINER_BIND
  if [ -n "${_m_start_in_workspace-}" ]; then
    export APPTAINER_CWD="$_m_workspace" APPTAINER_PWD="$_m_workspace"
  fi
  # The container starts without srun outside a Slurm allocation. It starts once, on the first node, if
  # the command starts its tasks itself.
  if [ -n "${_m_launches-}" ] || [ -z "${SLURM_JOB_ID-}" ] || ! command -v srun > /dev/null; then
    srun() { "$@"; }
  fi
}

# Runs the command, or each run of a benchmark.
_m_command() {
  local _m_text
  local -a _m_start=("$_m_shell" -c)
  if [ -n "${_m_plugin-}" ]; then
    _m_write_inside && _m_expand_options || { printf 'step=container\n' >> "$MANTIK_STATE"; return 1; }
    _m_start=(_m_srun "${_m_start[@]}")
  elif [ -n "${_m_image-}" ]; then
    _m_expand_options || { printf 'step=image\n' >> "$MANTIK_STATE"; return 1; }
    _m_start=(srun apptainer run "${_m_words[@]}" "$_m_image" "${_m_start[@]}")
  fi
  if [ -n "${_m_benchmark-}" ]; then
    : > "$_m_benchmark" || return
    _m_start=(_m_measured "$_m_benchmark" "$_m_benchmark_file" "${_m_start[@]}")
  fi
  for _m_text in "${_m_commands[@]}"; do "${_m_start[@]}" "$_m_text" || return; done
}

# Sets _m_words to the options of the container. Values of variables are used as they are: no word
# splitting, no file patterns.
_m_expand_options() {
  local IFS=
  set -f
  # Not in the array at once: bash puts a byte before DEL in double quotes there.
  eval "set -- $_m_options" || { _m_say "the options cannot be expanded"; return 1; }
  set +f
  _m_words=("$@")
}

# Runs the commands after the job, each even if another one fails, which is only reported. They share a
# shell until one ends it. No EXIT trap goes from one to the next: before 5.0, bash runs none in another.
_m_run_after() {
  local _m_i=0 _m_at _m_last=0
  while (( _m_i < ${#_m_after[@]} )); do
    (
      for (( _m_n = _m_i; _m_n < ${#_m_after[@]}; _m_n++ )); do
        # Where that cannot be written, each has a shell of its own.
        printf '%s\n' "$_m_n" >> "$_m_home/$_m_work/after" || {
          (( _m_n == _m_i )) || exit
          _m_alone=1
        }
        eval "${_m_after[_m_n]}"
        _m_code=$?
        (( _m_code == 0 )) || _m_say "a command after the job failed with $_m_code"
        [ -z "${_m_alone-}" ] || exit
      done
    )
    { while read -r _m_at; do _m_last=$_m_at; done < "$_m_home/$_m_work/after"; } 2>/dev/null
    (( _m_i = (_m_last > _m_i ? _m_last : _m_i) + 1 ))
  done
  return 0
}

# ---- containers of srun --------------------------------------------------------------------------

# Starts the command in the container, once per task, and waits for it. On TERM, srun would end its
# tasks at once, and it catches no warning (tried with Slurm 22.05). So it gets no signal here: it
# runs in a process group of its own, and scancel signals the tasks.
_m_srun() {
  local code=137 shell=sh
  local -a options=(--export=ALL)
  if [ -n "${_m_launches-}" ]; then
    options+=(--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}")
  fi
  [ -z "${_m_segments-}" ] || shell=bash
  rm -f -- "$_m_work/srun"
  _m_polls='' _m_last=
  trap '_m_signal_tasks TERM' TERM
  trap '_m_signal_tasks USR1' USR1
  trap '_m_signal_tasks USR2' USR2
  set -m
  {
    trap : TERM USR1 USR2
    srun "${options[@]}" "${_m_words[@]}" $shell -c "$_m_enter" "$_m_workspace" "./$_m_work/inside" "$@"
    printf '%s\n' "$?" > "$_m_work/srun"
  } < /dev/null &
  _m_steps=$!
  set +m
  while :; do
    # After a signal do not call `wait` again: see `_m_run`.
    if [ -z "$_m_polls" ]; then wait "$_m_steps"; else sleep 0.2; fi
    kill -0 "$_m_steps" 2>/dev/null || break
    if [ -n "$_m_last" ] && (( SECONDS >= _m_last )); then kill -s TERM -- "-$_m_steps"; fi
  done
  { read -r code < "$_m_work/srun"; } 2>/dev/null
  trap : TERM USR1 USR2
  if (( code )) && [ ! -e "$_m_work/started" ]; then printf 'step=container\n' >> "$MANTIK_STATE"; fi
  return "$code"
}

# Sends a signal to the tasks. Shortly before the grace period ends, TERM for srun ends the rest.
_m_signal_tasks() {
  _m_polls=1
  [ "$1" != USR1 ] || [ -z "${_m_segments-}" ] || _m_grace_s=$(( _m_warn_ms / 4000 ))
  if [ "$1" = TERM ] && [ -z "$_m_last" ]; then
    _m_last=$(( SECONDS + _m_grace_s - (_m_grace_s > 4 ? 2 : 1) ))
  fi
  scancel --quiet --signal="$1" "$SLURM_JOB_ID" > /dev/null 2>&1 ||
    kill -s "$1" -- "-$_m_steps" 2>/dev/null
}

# Runs in the container, with the workspace, the file of `_m_write_inside` and the command.
_m_enter='cd -- "$0" 2> /dev/null && [ -r "$1" ] || {
  echo "mantik: container: the workspace $0 is not among the mounts" >&2; exit 1; }
. "$1"'

# Writes what the container has to do first, for any POSIX shell. It gets the job's environment, but the
# variables that its image or definition sets come before those of the job.
_m_write_inside() {
  local name i
  local -a names=(TMPDIR MANTIK_STATE)
  for (( i = 0; i < ${#_m_variables[@]}; i += 3 )); do names+=("${_m_variables[i]}"); done
  [ -z "${_m_segments-}" ] ||
    names+=(MANTIK_SEGMENT MANTIK_SEGMENTS MANTIK_DEADLINE MANTIK_CONTINUE_FILE)
  {
    for name in "${names[@]}"; do
      [ -z "${!name+set}" ] || _m_assign "export $name" "${!name}"
    done
    _m_assign _m_work "$_m_work"
    _m_assign _m_python "${_m_python-}"
    _m_assign _m_own_tmpdir "${_m_tmpdir[*]+yes}"
    printf "_m_%s='%s'\n" secrets "${_m_secrets[*]}" temporary "${_m_temporary[*]}"
    cat <<'mantik-end-of-inside'
shift
: >> "./$_m_work/started"
_m_stop() {
  printf 'mantik: container: %s\n' "$2" >&2
  printf 'step=%s\n' "$1" >> "$MANTIK_STATE"
  exit 1
}
if [ -n "$_m_own_tmpdir" ]; then
  mkdir -p -- "$TMPDIR" 2>/dev/null; [ -d "$TMPDIR" ] && [ -w "$TMPDIR" ] ||
    _m_stop container "the directory $TMPDIR of the resource tmpdir is not among the mounts"
else
  for TMPDIR in "$TMPDIR" /tmp ""; do
    [ -z "$TMPDIR" ] || [ ! -d "$TMPDIR" ] || [ ! -w "$TMPDIR" ] || break
  done
  [ -n "$TMPDIR" ] || { TMPDIR=$PWD/$_m_work/scratch; mkdir -p -- "$TMPDIR"; }
fi
export TMPDIR
for _m_name in $_m_temporary; do export "$_m_name=$TMPDIR"; done
for _m_name in $_m_secrets; do
  eval "[ -n \"\${$_m_name+set}\" ]" ||
    _m_stop secrets "the variable $_m_name did not reach the container"
done
if [ -n "$_m_python" ]; then
  [ -r "$_m_python/bin/activate" ] || _m_stop python "there is no virtual environment $_m_python"
  . "$_m_python/bin/activate"
fi
mantik-end-of-inside
    if [ -z "${_m_segments-}" ]; then echo 'exec "$@"'; else _m_print_inside_segment; fi
  } >| "./$_m_work/inside"
}

# Prints an assignment that any POSIX shell reads.
_m_assign() {
  local mark="'" quoted="'\\''"
  printf "%s='%s'\n" "$1" "${2//$mark/$quoted}"
}

# The warning reaches all processes of the container's group, and would end those that do not handle it:
# so the command gets a group of its own.
_m_print_inside_segment() {
  declare -f _m_find_members _m_pass_caught
  cat <<'mantik-end-of-inside'
# Succeeds while the command runs; after TERM also while any of its processes does: the container ends
# with this shell, and the shell around a program may end before it has saved its state.
_m_goes_on() {
  ! kill -0 "$_m_group" 2>/dev/null || return 0
  [ -n "$_m_ending" ] && _m_find_members && (( ${#_m_members[@]} ))
}
_m_polls= _m_ending=
trap '_m_polls=1; _m_find_members; _m_pass_caught "${_m_members[@]}"' USR1
trap '_m_polls=1 _m_ending=1; kill -s TERM -- "-$_m_group" 2>/dev/null' TERM
_m_codes=$_m_work/code.${SLURM_PROCID:-0}
set -m
{ trap : TERM USR1; "$@"; printf '%s\n' "$?" > "$_m_codes"; } &
_m_group=$!
set +m
while :; do
  if [ -z "$_m_polls" ]; then wait "$_m_group"; else sleep 0.2; fi
  _m_goes_on || break
done
_m_code=143
{ read -r _m_code < "$_m_codes"; } 2>/dev/null
exit "$_m_code"
mantik-end-of-inside
}

