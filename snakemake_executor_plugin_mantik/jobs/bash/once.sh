# ---- something that is made once at a site, however many jobs ask for it at the same time --------
# Attempts are numbered. Attempt N has its own path DIR/N, so its result never mixes with that of
# another attempt, however that one ends. The job that makes the attempt first makes the directory
# DIR/N.lock, which only one job can make, also on NFS. The directory holds
#   alive   which changes as long as that job runs,
#   files   the files of its result: a site that purges by age removes single ones of them,
#   purged  whether one of them was missing,
#   end     how the attempt ended: done, failed, or gone. Only the first record of it counts.
# If an attempt shows no life for a while, a job that waits for it records it as gone, and the next
# attempt begins. Clocks of nodes are not compared. A completed result stays; later jobs find it. Of
# one that is purged in part, the rest stays, too: jobs may use it. The next attempt replaces it.
#
# Heartbeats come each 10 s. After 180 s without one another job takes over: network file systems show
# what another node wrote up to a minute late.
: "${_m_beat_s:=10}" "${_m_stale_s:=180}" "${_m_poll_s:=3}"

# Records the end $2 of the attempt of lock $1, if it has none; sets _m_attempt_end to what counts.
_m_end_attempt() {
  _m_make_uuid
  _m_create "$1/end" "$2" "$_m_uuid"
  _m_read_attempt "$1"
}

_m_read_attempt() {
  _m_attempt_end=
  { IFS= read -r _m_attempt_end < "$1/end"; } 2>/dev/null
}

# Lists the files of the result $1 without reading their attributes, which takes a parallel file
# system longer. Python itself writes and replaces what lies in __pycache__.
_m_list_made() { find "$1" -name __pycache__ -prune -o -printf '%P\n' | LC_ALL=C sort; }

# Checks that the result $2 of lock $1 is whole.
_m_is_whole() {
  local lost
  [ -e "$2" ] && [ -e "$1/files" ] && [ ! -e "$1/purged" ] || return
  ! IFS= read -r lost < <(_m_list_made "$2" 2>/dev/null | LC_ALL=C comm -23 "$1/files" - 2>/dev/null)
}

# Shows life until the job closes the other end of the pipe or is killed.
_m_show_life() {
  local count=0
  trap '' TERM INT HUP
  while :; do
    printf '%s\n' "$(( count++ ))" > "$1/alive"
    read -r -t "$_m_beat_s" _
    (( $? > 128 )) || exit 0
  done 2>/dev/null
}

# Makes attempt $2 in $1 with the function _m_maker; fails if that failed.
_m_attempt() {
  local dir=$1 number=$2 suffix=$3 lock=$1/$2.lock place=$1/$2$3 log=$1/$2.log code told='' other
  local heart begin=$SECONDS
  _m_say "makes the $_m_what in $place, once for this site"
  trap 'told=1' TERM INT HUP
  exec {heart}> >(_m_show_life "$lock" > /dev/null 2>&1 3>&-)
  ( trap - TERM INT HUP; "$_m_maker" "$place" ) > "$log" 2>&1 3>&- {heart}>&-
  code=$?
  if [ -n "$told" ]; then
    _m_end_attempt "$lock" gone
  elif (( code )); then
    _m_end_attempt "$lock" failed
  else
    # Without a list, in an image that has no such `find`, only the result itself is checked.
    _m_list_made "$place" > "$lock/files" 2>/dev/null || : > "$lock/files"
    _m_end_attempt "$lock" 'done'
  fi
  exec {heart}>&-
  if [ -n "$told" ]; then rm -rf -- "$place"; exit 143; fi
  trap - TERM INT HUP
  [ "$_m_attempt_end" = 'done' ] || rm -rf -- "$place"
  case $_m_attempt_end in
    (done) ;;
    (failed) _m_tell_failure "$log"; return 1 ;;
    # Another job recorded it as gone while it slept, and its result may have been removed.
    (*) return 0 ;;
  esac
  _m_say "made in $(( SECONDS - begin )) s"
  # Remove the partial results of other attempts: no job uses them. Where the log is gone, too, the
  # site has purged the attempt's records: it may have been done, and jobs may use its result.
  for other in "$dir"/*.lock; do
    number=${other##*/} number=${number%.lock}
    _m_read_attempt "$other"
    [ -e "$dir/$number.log" ] || continue
    case $_m_attempt_end in (gone | failed) rm -rf -- "${dir:?}/$number$suffix" ;; esac
  done
}

_m_tell_failure() {
  _m_say "the $_m_what could not be made; the end of $1:"
  tail -n 30 -- "$1" >&2
  local line
  for line in "${_m_advice[@]}"; do _m_say "$line"; done
}

# Sets _m_made to the result $1-MACHINE/N$2, made by the function $3 and called $4; waits if another job
# makes it. Fails if that failed; what to do then is in _m_advice.
_m_once() {
  local _m_maker=$3 _m_what=$4 dir suffix=$2 number=1 waited='' lost=0 lock alive seen since
  # A site may have nodes with different processors.
  dir=$1-$(uname -m)
  mkdir -p -- "$dir" || { _m_say "cannot make $dir"; return 1; }
  while :; do
    lock=$dir/$number.lock _m_made=$dir/$number$suffix
    _m_read_attempt "$lock"
    case $_m_attempt_end in
      (done)
        _m_is_whole "$lock" "$_m_made" && return 0
        # It may appear late.
        [ -e "$lock/purged" ] || sleep "$_m_poll_s"
        _m_is_whole "$lock" "$_m_made" && return 0
        [ -e "$lock/purged" ] ||
          _m_say "files of the $_m_what in $_m_made are gone, as after a purge by age: it is made again"
        : > "$lock/purged"
        (( number++ )); continue ;;
      (failed)
        if [ "$waited" = "$number" ]; then _m_tell_failure "$dir/$number.log"; return 1; fi
        (( number++ )); continue ;;
      (gone)
        (( number++ )); continue ;;
    esac
    if mkdir -- "$lock" 2>/dev/null; then
      _m_attempt "$dir" "$number" "$suffix" || return 1
      continue
    fi
    if [ ! -d "$lock" ]; then
      (( lost++ < 5 )) || { _m_say "cannot make $lock"; return 1; }
    elif [ "$waited" != "$number" ]; then
      waited=$number seen=none since=$SECONDS
      _m_say "waits for another job that makes the $_m_what in $_m_made"
    fi
    alive=
    { IFS= read -r alive < "$lock/alive"; } 2>/dev/null
    if [ "$alive" != "$seen" ]; then
      seen=$alive since=$SECONDS
    elif (( SECONDS - since >= _m_stale_s )); then
      _m_say "the job that made $_m_made shows no life any more"
      if [ -e "$lock/files" ]; then _m_end_attempt "$lock" 'done'; else _m_end_attempt "$lock" gone; fi
    fi
    sleep "$_m_poll_s"
  done
}

# ---- a rule's own environment --------------------------------------------------------------------
# A rule's command may be wrapped in bash that sets up its environment, in the workspace or a shadow
# directory: both have `.mantik`.

# Runs the function $1, which sets up the environment of $2, with the other arguments. The command
# reports a failure as that of the step `own`.
_m_own() {
  local function=$1
  _m_who=$2
  shift 2
  "$function" "$@" || { printf 'step=own\n' >> "${MANTIK_STATE:-/dev/null}"; return 1; }
}

# Loads modules as Snakemake does.
_m_load_modules() {
  _m_find_module || {
    _m_say "there is no command 'module' on this node: it is needed for envmodules: of this rule"
    return 1
  }
  module purge && MODULES_VERBOSITY=concise module load "$@" ||
    { _m_say "not all modules could be loaded: $*"; return 1; }
}

# Prints the shell commands that activate a conda environment: one of the node, by its name or path.
_m_find_conda() {
  exec 3>&1 1>&2
  _m_find_tools && _m_activate "$1" && return
  _m_say "there is no conda environment $1 on this node"
  _m_say "what to do: name one that is at the site, by its path if its tool is not found by itself, or"
  _m_say "an environment file (conda: envs/NAME.yaml), of which one is made there"
  return 1
}

# The same for one that is made of a file: called $1, in the directory $2 of .mantik/conda, of the file
# $3. $4 is a script to run in the new environment, if not empty, by $5. Machines and their explicit
# lists of packages follow, which are preferred to the file.
_m_make_conda() {
  local label=$1 _m_file=$3 _m_script=$4 _m_interpreter=$5
  local -a _m_pins=("${@:6}") _m_advice=(
    "what to do: where compute nodes reach no package server, name an environment that is at"
    "the site (conda: NAME or PATH); a failure that passes is tried again with the next job"
  )
  exec 3>&1 1>&2
  _m_home=$(cd -P .mantik/.. && pwd) && _m_find_tools || return
  if (( ${#_m_tools[@]} == 0 )); then
    _m_say "no micromamba, mamba or conda found on this node to build $label"
    _m_say "what to do: load a module that brings one (Environment: Modules in the backend config), or"
    _m_say "name one in the variable MANTIK_CONDA (Environment: Variables in the backend config)"
    return 1
  fi
  _m_once "$_m_home/.mantik/conda/$2" '' _m_create_and_deploy "conda environment $label" || return
  _m_activate "$_m_made" || { _m_say "cannot activate $_m_made, made of $label"; return 1; }
}

# Sets _m_tools to the tools that this node has. Fails if it lacks the one that is asked for.
_m_find_tools() {
  local name path
  _m_tools=()
  if [ -n "${MANTIK_CONDA-}" ]; then
    path=$(type -P "$MANTIK_CONDA") || {
      _m_say "the variable MANTIK_CONDA names $MANTIK_CONDA, which is no program on this node"
      return 1
    }
    _m_tools=("$path")
    return
  fi
  for name in micromamba mamba conda; do
    path=$(type -P "$name") && _m_tools+=("$path")
  done
  for path in "${MAMBA_EXE-}" "${CONDA_EXE-}" ~/.local/bin/micromamba ~/bin/micromamba \
    ~/miniforge3/bin/conda ~/mambaforge/bin/conda ~/miniconda3/bin/conda ~/anaconda3/bin/conda; do
    [ -n "$path" ] && [ -f "$path" ] && [ -x "$path" ] && _m_tools+=("$path")
  done
  return 0
}

# Prints the shell commands with which the tool $1 activates the environment $2, a name or a path.
_m_activation() {
  local folder=${1%/*}
  case ${1##*/} in
    (micromamba*) "$1" shell activate "$2" --shell bash ;;
    # mamba before version 2 is part of a conda installation and leaves activation to conda.
    (mamba) if [ -x "$folder/conda" ]; then "$folder/conda" shell.posix activate "$2"
            else "$1" shell activate "$2" --shell bash; fi ;;
    (*) "$1" shell.posix activate "$2" ;;
  esac
}

# Prints the commands that activate the environment at the path $1 without any tool.
_m_plain_activation() {
  local file
  printf 'export CONDA_PREFIX=%q CONDA_DEFAULT_ENV=%q CONDA_SHLVL=1\n' "$1" "$1"
  printf 'export PATH=%q:$PATH\n' "$1/bin"
  for file in "$1"/etc/conda/activate.d/*.sh; do
    [ ! -r "$file" ] || printf '. %q\n' "$file"
  done
}

_m_activate() {
  local tool code
  for tool in "${_m_tools[@]}"; do
    code=$(_m_activation "$tool" "$1") && [ -n "$code" ] && { printf '%s\n' "$code" >&3; return; }
  done
  # The environment may belong to another tool, or to none.
  [ -d "$1/conda-meta" ] && _m_plain_activation "$1" >&3
}

# Creates the environment $1. Package caches are shared, and some tools do not lock them, so jobs
# take turns. In case a job hangs, they wait at most 10 minutes, and only in the first attempt.
_m_create_and_deploy() {
  local turn code
  exec {turn}> "$_m_home/.mantik/conda/turn" || return
  if [ "${1##*/}" = 1 ] && command -v flock > /dev/null; then flock -w 600 "$turn" 2>/dev/null; fi
  _m_create_conda "$1" {turn}>&- || return
  [ -n "$_m_script" ] || return 0
  code=$(_m_activate "$1" 3>&1) && eval "$code" || return
  cd -- "$_m_home" && $_m_interpreter "$_m_home/$_m_script" {turn}>&-
}

_m_create_conda() {
  local pin=
  local i
  for (( i = 0; i < ${#_m_pins[@]}; i += 2 )); do
    [ "${_m_pins[i]}" != "$(uname -m)" ] || pin=$_m_home/${_m_pins[i + 1]}
  done
  if [ -n "$pin" ]; then
    _m_run_tool create --file "$pin" --prefix "$1" && return
    printf 'The pinned packages cannot be had, the environment file is taken.\n'
    rm -rf -- "$1"
  fi
  _m_run_tool env --file "$_m_home/$_m_file" --prefix "$1"
}

_m_run_tool() {
  local tool=${_m_tools[0]} kind=$1
  local -a words=(create)
  shift
  export CONDA_ALWAYS_YES=true MAMBA_ALWAYS_YES=true
  # micromamba takes environment files with `create`, the other tools with `env create`.
  case ${tool##*/} in
    (micromamba*) ;;
    (mamba) [ "$kind" != env ] || words=(env create) ;;
    (*) words+=(--no-default-packages); [ "$kind" != env ] || words=(env "${words[@]}") ;;
  esac
  printf '+ %s %s --quiet %s\n' "$tool" "${words[*]}" "$*"
  "$tool" "${words[@]}" --quiet "$@" < /dev/null
}

# Prints the path of a virtual environment, which the first job that needs it makes, and which is called
# $1: in the directory $2, absolute or relative to .mantik/python, of the requirements in the files from
# $6 on. pip runs in the directory $3. $4 is the version of Python to prefer, `3.12`, or empty; $5 says
# which advice follows a failure. The environment belongs to the Python and `_m_modules`: packages are
# built for these.
_m_make_venv() {
  local _m_folder=$3 version=$4 path=$2 content found
  local -a _m_files=("${@:6}") _m_advice=(
    "what to do: where compute nodes reach no package index, make the environment on a login node"
    "and name it without Requirements; a failure that passes is tried again with the next job"
  )
  [ "$5" = packages ] || _m_advice=(
    "what to do: where compute nodes reach no package index, make the environment on a login"
    "node, name it in the backend config (Environment: Python), and do not deploy the"
    "project's; a failure that passes is tried again with the next job"
  )
  exec 3>&1 1>&2
  # Commands before may have set any of these.
  trap - ERR DEBUG RETURN EXIT
  set +eufC -o pipefail
  IFS=$' \t\n'
  cd -P -- .mantik/.. || return
  _m_home=$PWD
  case $path in /*) ;; *) path=$PWD/.mantik/python/$path ;; esac
  _m_interpreter=$(type -P "python${version:-3}" || type -P python3) || {
    _m_say "there is no python3 on this node to make the virtual environment $1"
    _m_say "what to do: load a module that provides one (Environment: Modules in the backend config)"
    return 1
  }
  if [ -n "$version" ]; then
    found=$("$_m_interpreter" -V 2>&1)
    case $found. in
      ("Python $version".*) ;;
      (*) _m_say "the project asks for Python $version and this node has $found" ;;
    esac
  fi
  content=$({
    printf '%s\n' "$_m_interpreter" "${_m_modules[@]}" && readlink -f -- "$_m_interpreter" &&
      sha256sum -- "${_m_files[@]}"
  } | sha256sum) ||
    { _m_say "not all files can be read that the virtual environment $1 is made of"; return 1; }
  _m_once "$path/${content:0:16}" '' _m_create_venv "virtual environment $1" || return
  printf '%s' "$_m_made" >&3
}

_m_create_venv() {
  cd -- "./$_m_folder" || return
  printf '+ %s -m venv %s\n' "$_m_interpreter" "$1"
  "$_m_interpreter" -m venv "$1" || return
  printf '+ pip install -r %s\n' "${_m_files[0]}"
  "$1/bin/python" -m pip install --disable-pip-version-check --no-input -r "$_m_home/${_m_files[0]}" < /dev/null
}

# Runs the program from $3 on in the container of an image, with the workspace as its home, in the same
# working directory. $1 is the image, a URL if $2 is not empty: a directory of .mantik/images, to which
# the first job that needs it fetches it. `_m_options` are further options.
_m_enter_image() {
  local here engine binds image=$1
  local -a _m_advice=(
    "what to do: where compute nodes reach no registry, fetch the image to a file here"
    "(apptainer pull FILE.sif URL) and name the file in container:"
  )
  _m_home=$(cd -P .mantik/.. && pwd) && here=$(pwd -P) || return
  _m_engine=$(type -P apptainer) || _m_engine=$(type -P singularity) || {
    _m_say "there is neither apptainer nor singularity on this node, which the image of this rule needs"
    return 1
  }
  if [ -n "$2" ]; then
    _m_url=$1
    _m_once "$_m_home/.mantik/images/$2" .sif _m_pull "image $1" >&2 || return
    image=$_m_made
  else
    case $image in /*) ;; *) image=$_m_home/$image ;; esac
    [ -e "$image" ] || { _m_say "there is no image $image"; return 1; }
  fi
  _m_bindable "$_m_home"
  binds=(--bind "$_m_bound")
  # Apptainer mounts /tmp and /var/tmp by itself, but TMPDIR of a node is often elsewhere.
  case ${TMPDIR:-/tmp}/ in
    (/tmp/* | /var/tmp/*) ;;
    (*) if [ -d "$TMPDIR" ]; then _m_bindable "$TMPDIR"; binds+=(--bind "$_m_bound"); fi ;;
  esac
  shift 2
  trap - TERM INT HUP
  _m_expand_options || return
  exec "$_m_engine" exec --home "$_m_home" "${binds[@]}" --pwd "$here" "${_m_words[@]}" "$image" "$@"
}

_m_pull() { "$_m_engine" pull "$1" "$_m_url"; }

