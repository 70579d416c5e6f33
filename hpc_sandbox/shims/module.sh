# `module` for the sandbox; read by every bash of a job through BASH_ENV.
if [ -n "${MANTIK_SANDBOX_MODULE_INIT-}" ]; then
    # The real one takes half a second to start, in each bash: only what calls `module` waits for it.
    module() {
        unset -f module
        # shellcheck disable=SC1090
        . "$MANTIK_SANDBOX_MODULE_INIT"
        module use --append "$MANTIK_SANDBOX_MODULES"
        module "$@"
    }
    return
fi
module() {
    local action="${1:-}" name file
    [ "$#" -gt 0 ] && shift
    case "$action" in
    load | add)
        for name in "$@"; do
            file="$MANTIK_SANDBOX_MODULES/$name"
            if [ -d "$file" ]; then
                file="$(printf '%s\n' "$file"/* | sort -V | tail -n 1)"
            fi
            if [ ! -f "$file" ]; then
                printf '%s\n' \
                    'Lmod has detected the following error:  The following module(s) are unknown:' \
                    "\"$name\"" '' \
                    'Please check the spelling or version number. Also try "module spider ..."' >&2
                return 1
            fi
            case ":${LOADEDMODULES:-}:" in
            *":${file#"$MANTIK_SANDBOX_MODULES"/}:"*) continue ;; # a second time changes nothing
            esac
            # shellcheck disable=SC1090
            . "$file"
            export LOADEDMODULES="${LOADEDMODULES:+$LOADEDMODULES:}${file#"$MANTIK_SANDBOX_MODULES"/}"
        done
        ;;
    list)
        printf 'Currently Loaded Modules:\n  %s\n' "${LOADEDMODULES:-}" >&2
        ;;
    avail | spider)
        (cd "$MANTIK_SANDBOX_MODULES" && printf '  %s\n' */*) >&2
        ;;
    purge | reset)
        unset LOADEDMODULES
        ;;
    use | unuse | unload | rm | swap | --force) ;;
    *)
        printf 'module: the sandbox does not know "%s"\n' "$action" >&2
        return 1
        ;;
    esac
}
