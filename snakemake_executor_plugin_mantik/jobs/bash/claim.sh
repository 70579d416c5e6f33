# ---- claim ---------------------------------------------------------------------------------------
# Only one start of this attempt can make the claim; all others end. A directory in its place means that
# the attempt was revoked.

_m_make_claim() {
  local unique owner='' i
  for i in 1 2 3 4; do
    [ -d "$_m_attempts" ] && break
    sleep 0.5
  done
  # The controller made the directory before it submitted: it has removed it, and waits no longer.
  [ -d "$_m_attempts" ] || return 1
  _m_make_uuid
  unique=$_m_uuid-${_m_host%%.*}-$$
  _m_now
  _m_create "$_m_claim" "owner=$unique
began=$_m_time
site_job=${_m_site_job//$'\n'/ }
scheduler_job=${_m_scheduler_job//$'\n'/ }
identity=$_m_identity
host=${_m_host//$'\n'/ }" "${unique//[!A-Za-z0-9.-]/_}"
  for (( i = 0; i < 120; i++ )); do
    if [ -d "$_m_claim" ]; then owner=revoked; break; fi
    owner=
    { IFS= read -r owner < "$_m_claim"; } 2>/dev/null
    case $owner in owner=?*) owner=${owner#owner=}; break ;; esac
    sleep 0.25
  done
  [ "$owner" = "$unique" ] && return 0
  [ -n "$owner" ] && return 1
  _m_say "cannot claim $_m_attempt in $_m_workspace/$_m_attempts: is the file system full or away?"
  exit 75
}

# Succeeds if the controller that submitted this attempt still leads the place, or the leading one knows
# the attempt. Another one may have taken over while the attempt waited, and have submitted the job again.
_m_is_known() {
  (( _m_term )) || return 0
  local name term last=0 line
  for name in .mantik/place/*.*.*.*.*; do
    name=${name##*/} term=${name%%.*}
    case $term in '' | *[!0-9]*) ;; *) (( term > last )) && last=$term ;; esac
  done
  (( last > _m_term )) || return 0
  while IFS= read -r line; do
    [ "$line" != "$_m_attempt" ] || return 0
  done 2>/dev/null < ".mantik/place/known.$last"
  return 1
}

