# shellcheck shell=bash
# Shared functions of the launch scripts: options, quoting, and running commands.
#
# A script lists its options in `options` (with a value) and `switches` (without), sets a variable
# with the default of each, sources this file and calls `parse "$@"`. Invalid use exits with status 2.
set -euo pipefail
exec 3>&1 # output of a dry run, also inside a command substitution

dry_run='' yes='' quiet=''
words=() # arguments that are not options
rest=()  # arguments after --, which are passed to jaxrank

say() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
}

die() {
    say "$*"
    exit 2
}

# Prints the comment at the top of the script.
help() {
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
}

parse() {
    local argument name known
    while [ $# -gt 0 ]; do
        argument=$1
        shift
        case $argument in
        --) rest=("$@") && return ;;
        -h | --help) help && exit 0 ;;
        --*)
            name=${argument%%=*}
            name=${name#--}
            known=" ${options[*]-} | ${switches[*]-} dry-run yes "
            if [[ ${known%%|*} == *" $name "* ]]; then
                if [[ $argument != *=* ]]; then
                    [ $# -gt 0 ] || die "--$name needs a value."
                    argument=$argument=$1
                    shift
                fi
                printf -v "${name//-/_}" %s "${argument#*=}"
            elif [[ ${known#*|} == *" $name "* && $argument != *=* ]]; then
                printf -v "${name//-/_}" yes
            else
                die "unknown option $argument. Try --help."
            fi
            ;;
        -*) die "unknown option $argument. Try --help." ;;
        *) words+=("$argument") ;;
        esac
    done
}

# Exits unless the options have a value.
need() {
    local name variable
    for name; do
        variable=${name//-/_}
        [ -n "${!variable}" ] || die "--$name: must be given. Try --help."
    done
}

need_whole_numbers() {
    local name variable
    for name; do
        variable=${name//-/_}
        [[ ${!variable} =~ ^(0|[1-9][0-9]*)$ ]] ||
            die "--$name: must be a whole number: found '${!variable}'."
    done
}

# These characters are valid in names on every cloud, and are not special in a shell or in YAML.
need_name() {
    [[ ${1-} =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
        die "name: must be up to 40 lowercase letters, digits and dashes: found '${1-}'."
}

# Quotes words as one line that any POSIX shell parses into the same words.
quoted() {
    local word line='' quote="'\\''"
    for word; do
        if [[ $word =~ ^[[:alnum:]_@%+=:,./-]+$ ]]; then
            line+=" $word"
        else
            line+=" '${word//"'"/"$quote"}'"
        fi
    done
    printf %s "${line# }"
}

# Runs a command. $input is its standard input if it is set. If $replace is set, the command replaces
# the script. A dry run prints the command instead.
run() {
    local line
    line=$(quoted "$@")
    if [ -n "$dry_run" ]; then
        if [ -n "${input-}" ]; then
            printf "%s <<'END'\n%s\nEND\n" "$line" "$input" >&3
        else
            printf '%s\n' "$line" >&3
        fi
        return
    fi
    [ -n "$quiet" ] || printf '+ %s\n' "$line" >&2
    [ -z "${replace-}" ] || exec "$@" 3>&-
    if [ -n "${input-}" ]; then
        "$@" <<<"$input" 3>&-
    else
        "$@" 3>&-
    fi
}

# Exits unless --yes is set or the user confirms.
confirm() {
    local answer=''
    [ -z "$yes$dry_run" ] || return 0
    [ -t 0 ] || die "$1 Standard input is not a terminal: confirm with --yes."
    read -r -p "$1 [y/N] " answer || true
    [[ $answer == [yY]* ]] || die "nothing was deleted."
}
