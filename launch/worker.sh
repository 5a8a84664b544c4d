#!/usr/bin/env bash
# Commands that launch/tpu.sh runs on each worker of a TPU, in the copy of this repository there.
#
#   launch/worker.sh install|start|status|stop [OPTION ...] [-- VERB AND FLAGS OF JAXRANK]
#
#   install  installs jaxrank for TPUs into .venv
#   start    starts jaxrank in the background, and appends its output to ~/jaxrank.log
#   status   prints the state of jaxrank, or its exit status
#   stop     stops jaxrank
#
#   --python=3.12        version for .venv. The TPU images have 3.10, which is too old
#   --nfs=SERVER:/SHARE  mounted at --mount before start
#   --mount=/mnt/jaxrank
#   --dry-run            prints the commands
options=(python nfs mount)
switches=()
python=3.12 nfs='' mount=/mnt/jaxrank
script_dir=${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}.
# shellcheck source=launch/command.sh
source "$script_dir/command.sh" || exit
parse "$@"
root=$(cd "$script_dir/.." && pwd)
self=$root/launch/worker.sh
log=$HOME/jaxrank

install() {
    cd "$root"
    # uv installs the Python version that the image does not have.
    run python3 -m pip install --quiet --user uv
    run python3 -m uv venv --quiet --allow-existing --python "$python" .venv
    run python3 -m uv pip install --quiet --python .venv/bin/python --constraints constraints.txt \
        --editable '.[tpu]'
}

share() {
    mountpoint --quiet "$mount" && return
    # A new machine holds the lock of apt for its own updates.
    run sudo apt-get --quiet --quiet --option DPkg::Lock::Timeout=300 install --yes nfs-common
    run sudo mkdir -p "$mount"
    run sudo mount -t nfs "$nfs" "$mount"
    [ -n "$dry_run" ] || [ -w "$mount" ] ||
        die "$nfs must be writable for $USER. Run 'sudo chmod a+rwx $mount' on one worker."
}

# jaxrank itself holds the lock, so it is released with the last process, however that ends.
running() {
    ! flock --nonblock 9 9>>"$log.lock"
}

start() {
    [ ${#rest[@]} -gt 0 ] || die "the verb and flags of jaxrank must follow --."
    ! running || die "jaxrank is running here. Stop it first."
    [ -z "$nfs" ] || share
    [ -n "$dry_run" ] || rm -f "$log.pid" "$log.status"
    run setsid --fork "$self" work -- "${rest[@]}"
    [ -n "$dry_run" ] || timeout 10 bash -c "until [ -s \"\$0\" ]; do sleep 0.1; done" "$log.pid"
}

work() {
    exec >>"$log.log" 2>&1 <"/dev/null" 3>&- 9>>"$log.lock"
    flock --nonblock 9
    local status=0
    echo "$$" >"$log.pid"
    printf '%s starts: jaxrank %s\n' "$(date -u +%FT%TZ)" "$(quoted "${rest[@]}")"
    cd "$root"
    .venv/bin/jaxrank "${rest[@]}" || status=$?
    echo "$status" >"$log.status"
}

status() {
    if running; then
        echo "jaxrank is running"
    elif [ -s "$log.status" ]; then
        echo "jaxrank ended with status $(<"$log.status")"
    elif [ -s "$log.pid" ]; then
        echo "jaxrank was ended from outside"
    else
        echo "jaxrank has not run"
    fi
}

stop() {
    local second
    running || return 0
    run kill -TERM -- "-$(<"$log.pid")" # setsid made it the leader of its group
    for ((second = 0; second < 120; second++)); do # it saves a checkpoint first
        { [ -z "$dry_run" ] && running; } || return 0
        sleep 1
    done
    run kill -KILL -- "-$(<"$log.pid")"
}

case ${words[*]-} in
install | start | work | status | stop) "${words[0]}" ;;
*) die "the argument must be a verb: found '${words[*]-}'. Try --help." ;;
esac
