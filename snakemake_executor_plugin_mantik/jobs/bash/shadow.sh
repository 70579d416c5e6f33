# ---- shadow directories --------------------------------------------------------------------------

# Runs the program and arguments in the shadow directory `_m_shadow` of depth `_m_depth`. All files
# except `_m_shadow_outputs` and `_m_shadow_logs` are deleted with it; after a failure only the logs are
# kept. All runs of a measured command use the same directory: the first one makes it, the last one
# removes it.
#
# `_m_folders` are directories of the rule's files, `_m_shadow_inputs` and `_m_also` paths and the
# targets of links to them from the shadow directory; what is in `_m_also` may be there already.
_m_run_in_shadow() {
  local i code=0
  trap : TERM INT HUP
  _m_home=$(pwd -P)
  _m_shadow=$_m_home/$_m_shadow
  if [ -n "${_m_first-}" ]; then _m_make_shadow || _m_fail_in_shadow "it could not be made"; fi
  ( trap - TERM INT HUP; export MANTIK_WORKSPACE=$_m_home; cd -- "$_m_shadow" && exec "$@" )
  code=$?
  [ -n "${_m_last-}" ] || [ "$code" != 0 ] || exit 0
  if [ "$code" = 0 ]; then
    for i in "${_m_shadow_outputs[@]}"; do _m_take "$i" || _m_fail_in_shadow "cannot move $i out of it"; done
  fi
  for i in "${_m_shadow_logs[@]}"; do _m_take "$i"; done
  rm -rf -- "$_m_shadow"
  exit "$code"
}

_m_fail_in_shadow() {
  _m_say "the shadow directory: $*"
  rm -rf -- "$_m_shadow"
  exit 1
}

# Links files of the directory $1 of the workspace.
_m_link() {
  local i
  local -a files=()
  for i in "${@:2}"; do files+=("$_m_home${i#.}"); done
  ln -s -t "$_m_shadow/${1#.}" -- "${files[@]}"
}

_m_make_shadow() {
  local i
  local -a hidden=(! -name .mantik)
  rm -rf -- "$_m_shadow" && mkdir -p -- "$_m_shadow" || return
  ln -s -- "$_m_home/.mantik" "$_m_shadow/.mantik" || return
  if [ -n "${_m_storage_link-}" ]; then
    mkdir -p -- "$_m_shadow/${_m_storage_link%/*}" || return
    ln -sT -- "$_m_storage_target" "$_m_shadow/$_m_storage_link" || return
    hidden+=(! -name .snakemake)
  fi
  case $_m_depth in
    shallow)
      find . -mindepth 1 -maxdepth 1 "${hidden[@]}" -printf '%h\0%f\0' | _m_by_directory _m_link || return ;;
    full)
      find -L . -mindepth 1 \( -path ./.mantik -o -path ./.snakemake \) -prune -o \
        -type d -printf '%P\0' 2>/dev/null | ( cd -- "$_m_shadow" && xargs -0 -r mkdir -p -- ) || return
      find -L . -mindepth 1 \( -path ./.mantik -o -path ./.snakemake \) -prune -o \
        ! -type d -printf '%h\0%f\0' 2>/dev/null | _m_by_directory _m_link || return ;;
    *)
      for i in "${_m_folders[@]}"; do mkdir -p -- "$_m_shadow/$i" || return; done
      for (( i = 0; i < ${#_m_shadow_inputs[@]}; i += 2 )); do
        _m_bring "${_m_shadow_inputs[i]}" "${_m_shadow_inputs[i + 1]}" || return
      done ;;
  esac
  for (( i = 0; i < ${#_m_also[@]}; i += 2 )); do
    [ -e "$_m_shadow/${_m_also[i]}" ] ||
      ln -sT -- "${_m_also[i + 1]}" "$_m_shadow/${_m_also[i]}" || return
  done
}

_m_bring() {
  if [ "$_m_depth" = copy-minimal ]; then cp -rLT --preserve=mode -- "$1" "$_m_shadow/$1"
  else ln -sT -- "$2" "$_m_shadow/$1"; fi
}

# Moves $1 from the shadow directory to its real place.
_m_take() {
  local from=$_m_shadow/$1 to=$_m_home/$1 target
  [[ -e $from || -L $from ]] || return 0
  if [ -L "$from" ]; then
    target=$(readlink -- "$from") || return
    if [ "${target:0:1}" = / ]; then
      target=$(realpath -sm --relative-to="$_m_shadow" -- "$target") || return
      rm -f -- "$from" && ln -s -- "$target" "$from" || return
    fi
  fi
  [ "$(realpath -m -- "$from")" != "$(realpath -m -- "$to")" ] || return 0
  mv -f -T -- "$from" "$to"
}

