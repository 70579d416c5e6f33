# ---- benchmark -----------------------------------------------------------------------------------
# Measures the figures of Snakemake's `benchmark:` with /proc, which every Linux has. Writes a line
# per run of the command: its start and end in seconds. If it could be sampled, these follow: the
# greatest rss, vms, uss and pss, the bytes read and written, the CPU ticks used, and the ticks per
# second. The directory $_m_scratch holds the latest figures.

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

