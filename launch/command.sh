# shellcheck shell=bash
# What the launch scripts share: options, quoting, and the one way in which all run a command.
#
# A script names its options in `options` (with a value) and `switches` (without), gives each a
# variable with its default, sources this file and calls `parse "$@"`. Wrong use ends with status 2.
set -euo pipefail
exec 3>&1 # where a dry run prints, in a command substitution too

dry_run='' yes='' quiet=''
words=() # arguments that are no options
rest=()  # arguments behind --, which are jaxrank's

say() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
}

die() {
    say "$*"
    exit 2
}

# The comment at the top of the script.
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

# Ends the script unless the options have a value.
need() {
    local name variable
    for name; do
        variable=${name//-/_}
        [ -n "${!variable}" ] || die "--$name must be given. Try --help."
    done
}

need_whole_numbers() {
    local name variable
    for name; do
        variable=${name//-/_}
        [[ ${!variable} =~ ^(0|[1-9][0-9]*)$ ]] ||
            die "--$name must be a whole number: found '${!variable}'."
    done
}

# Each cloud allows these characters in names, and neither a shell nor YAML gives them a meaning.
need_name() {
    [[ ${1-} =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
        die "a name of up to 40 small letters, digits and dashes must be given: found '${1-}'."
}

# Words as one line that any POSIX shell reads as these words again.
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

# Runs a command, with $input as its standard input if there is any, or in place of the script if
# $replace is set; a dry run prints it instead.
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

# Ends the script unless --yes was given or the user says so.
confirm() {
    local answer=''
    [ -z "$yes$dry_run" ] || return 0
    [ -t 0 ] || die "$1 Nobody can be asked here: --yes says so."
    read -r -p "$1 [y/N] " answer || true
    [[ $answer == [yY]* ]] || die "nothing was deleted."
}
