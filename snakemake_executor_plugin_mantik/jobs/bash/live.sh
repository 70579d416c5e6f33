# ---- what the job writes to a directory, while it runs -------------------------------------------
# Packs what is new below the directory. The packs are concatenated into pieces of a limited size,
# each named after the byte at which it begins. The size of CLAIM.live, a sparse file without
# content, is their total size, so a listing of the claims shows it. A pack is a gzipped tar with
#   ./PATH          a new or changed file, whole,
#   part/N/PATH     the content of a growing file from byte N on,
#   later           the paths of files that are too large.
# All of it is downloaded again when the job has ended, so a failure here is harmless.

_m_list_live() {
  LC_ALL=C find -H "$_m_live" -type f ! -path $'*\n*' -printf '%s %T@ %P\n' | LC_ALL=C sort > "$1"
}

# Lists what exists before the command starts: it is not reported. `_m_look` reports the rest.
_m_begin_live() {
  mkdir -p -- "$_m_work/live" && _m_list_live "$_m_work/live/first" &&
    cp -- "$_m_work/live/first" "$_m_work/live/new" &&
    mv -f -- "$_m_work/live/new" "$_m_work/live/seen"
} 2>/dev/null

# Removes the directory if the job has not changed it: there is nothing to report. Runs in a
# subshell, which ends without removing it if a listing fails.
_m_drop_untouched() (
  set -eo pipefail
  at=$_m_work/live
  [ -s "$at/first" ]
  _m_list_live "$at/last"
  cmp -s -- "$at/first" "$at/last"
  unlisted=$(find -H "$_m_live" -path $'*\n*' -print -quit)
  [ -z "$unlisted" ]
  rm -rf -- "$_m_live"
) 2>/dev/null

# Looks once for changes. Runs beside the heartbeats, which do not wait for it.
_m_look() {
  local at=$_m_work/live line size path folder from most left=$_m_pack_bytes  # of unpacked files
  local -A known=()
  export LC_ALL=C
  [ -e "$at/seen" ] && _m_list_live "$at/now" || return
  cmp -s -- "$at/seen" "$at/now" && return
  comm -13 -- "$at/seen" "$at/now" > "$at/new" || return
  [ -s "$at/new" ] || return
  comm -12 -- "$at/seen" "$at/now" > "$at/next" || return
  rm -rf -- "$at/part" && mkdir -- "$at/part" && : > "$at/whole" && : > "$at/later" || return
  while IFS= read -r line; do known[${line#* * }]=${line%% *}; done < <(comm -23 -- "$at/seen" "$at/now")
  while IFS= read -r line; do
    size=${line%% *} path=${line#* * }
    if [[ $path =~ $_m_growing ]]; then
      from=${known[$path]-0} most=$_m_live_file_bytes
      (( size >= from )) || from=0
      if (( size - from < most )); then most=$(( size - from )); fi
      folder=/$path folder=$at/part/$from${folder%/*}
      mkdir -p -- "$folder" || return
      dd if="$_m_live/$path" of="$at/part/$from/$path" bs=64k iflag=skip_bytes,count_bytes \
        skip="$from" count="$most" 2>/dev/null || continue
      line="$(( from + most )) ${line#* }" size=$most
      if (( most == 0 )); then rm -f -- "$at/part/$from/$path"; fi
    elif (( size > _m_live_file_bytes )); then
      printf '%s\0' "$path" >> "$at/later"
      size=0
    else
      printf './%s\0' "$path" >> "$at/whole"
    fi
    printf '%s\n' "$line" >> "$at/next"
    # The next looks pack the rest.
    (( (left -= size + 512) > 0 )) || break
  done < "$at/new"
  sort -o "$at/next" -- "$at/next" || return
  tar -czf "$at/pack" --format=gnu --ignore-failed-read -C "$_m_home/$at" later part \
    -C "$_m_home/$_m_live" --null -T "$_m_home/$at/whole"
  (( $? < 2 )) || return  # 1: a file changed meanwhile; the next look packs it again
  _m_add_pack "$at" && mv -f -- "$at/next" "$at/seen"
}

# Adds a pack. CLAIM.live grows only after the whole pack is written, so a partial one never counts.
_m_add_pack() {
  local have start size piece
  have=$(stat -c %s -- "$_m_claim.live" 2>/dev/null || echo 0)
  size=$(stat -c %s -- "$1/pack") || return
  { read -r start < "$1/start"; } 2>/dev/null || start=0
  # The limit is reached, or CLAIM.live was removed: report nothing more before the end.
  if (( have + size > _m_live_bytes || have < start )); then : > "$1/full"; return 1; fi
  if (( have - start >= _m_piece_bytes )); then
    start=$have
    _m_replace "$1/start" "$start" || return
  fi
  piece=$1/piece.$start
  # Remove a partial pack, left by a look that was killed or had no room.
  if [ -e "$piece" ]; then truncate -s "$(( have - start ))" -- "$piece" || return; fi
  cat -- "$1/pack" >> "$piece" || return
  [ "$(stat -c %s -- "$piece")" = "$(( have - start + size ))" ] && [ -f "$_m_claim" ] &&
    truncate -s "$(( have + size ))" -- "$_m_claim.live"
}

