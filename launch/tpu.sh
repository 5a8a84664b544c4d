#!/usr/bin/env bash
# Creates Cloud TPU VMs, runs jaxrank on all their workers, and deletes the VMs.
#
#   launch/tpu.sh VERB NAME --zone=ZONE [OPTION ...] [-- VERB AND FLAGS OF JAXRANK]
#   launch/tpu.sh create my-tpu --zone=europe-west4-a --accelerator-type=v3-8 --spot
#   launch/tpu.sh run my-tpu --zone=europe-west4-a --nfs=10.0.0.2:/jaxrank \
#       -- train --config=configs/standard.py --workdir=/mnt/jaxrank/standard
#
# Verbs, in the order of their use. Use --queued with all of them or with none:
#   create   creates a TPU VM, or with --queued a queued resource
#   wait     waits until it is ready
#   copy     copies this repository to ~/jaxrank on every worker
#   install  installs jaxrank on every worker, in ~/jaxrank/.venv
#   run      runs jaxrank on all workers in the background, with the arguments after --
#   logs     follows the log of one worker
#   status   prints the state of the TPU, and of jaxrank on each worker
#   stop     stops jaxrank, but not the TPU
#   resume   does all remaining steps of the above: after a preemption all of them, on a new TPU
#   delete   deletes the TPU, or its remains, after a confirmation
#
# Options:
#   --zone=ZONE --project=PROJECT   default: CLOUDSDK_COMPUTE_ZONE, and the project of gcloud
#   --accelerator-type=v3-8     chips: v3-8 has one worker, v3-32 has four
#   --runtime-version=VERSION   of the image. Default: by the accelerator type
#   --queued                    NAME is a queued resource
#   --slices=1                  number of slices. More than one slice are always queued
#   --valid-until-duration=6h   a queued request that is not granted by then is cancelled
#   --spot --reserved           billing of the TPU
#   --network=NET --subnetwork=NET --service-account=ACCOUNT
#   --nfs=SERVER:/SHARE         run mounts it at /mnt/jaxrank on every worker
#   --python=3.12               Python version for install
#   --slice=0 --worker=0        worker for logs
#   --watch                     resume repeats until jaxrank has finished. Needs --yes
#   --every=60                  seconds between two checks of wait and --watch
#   --retries=20                failures after which --watch stops. Preemptions do not count
#   --yes                       deletes without a confirmation
#   --dry-run                   prints every command instead of running it
options=(zone project accelerator-type runtime-version slices valid-until-duration network
    subnetwork service-account nfs python slice worker every retries)
switches=(queued spot reserved watch)
zone=${CLOUDSDK_COMPUTE_ZONE-} project='' accelerator_type='' runtime_version='' slices=1 valid_until_duration=''
network='' subnetwork='' service_account='' nfs='' python='' slice=0 worker=0 every=60 retries=20
queued='' spot='' reserved='' watch=''
script_dir=${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}.
# shellcheck source=launch/command.sh
source "$script_dir/command.sh" || exit
parse "$@"
[ ${#words[@]} -eq 2 ] || die "arguments must be a verb and a name: found '${words[*]-}'. Try --help."
name=${words[1]}
need_name "$name"
need zone
need_whole_numbers slices slice worker every retries
[ "$slices" -gt 0 ] || die "--slices: must be at least 1: found 0."
[ "$slices" -eq 1 ] || queued=yes
root=$(cd "$script_dir/.." && pwd)

# gcloud has the same verbs for queued resources and TPU VMs, but other fields for their states.
if [ -n "$queued" ]; then
    service=queued-resources state_field=state.state all=(--node=all --worker=all)
else
    service=tpu-vm state_field=state all=(--worker=all)
fi

tpu() { # verb of gcloud, its arguments
    run gcloud compute tpus "$service" "$@" --zone="$zone" ${project:+--project="$project"}
}

on_all() { # words of a command
    tpu ssh "$name" "${all[@]}" --command="$(quoted "$@")"
}

# https://cloud.google.com/tpu/docs/runtimes
runtime() {
    case $accelerator_type in
    v2-* | v3-* | v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) die "--runtime-version: must be given for --accelerator-type=$accelerator_type." ;;
    esac
}

create() {
    local wanted=() version
    need accelerator-type
    version=${runtime_version:-$(runtime)} || exit
    wanted+=(--accelerator-type="$accelerator_type" ${spot:+--spot} ${reserved:+--reserved}
        ${network:+--network="$network"} ${subnetwork:+--subnetwork="$subnetwork"}
        ${service_account:+--service-account="$service_account"})
    if [ -z "$queued" ]; then
        tpu create "$name" --version="$version" "${wanted[@]}"
        return
    fi
    if [ "$slices" -gt 1 ]; then
        wanted+=(--node-count="$slices" --node-prefix="$name")
    else
        wanted+=(--node-id="$name")
    fi
    tpu create "$name" --runtime-version="$version" "${wanted[@]}" \
        ${valid_until_duration:+--valid-until-duration="$valid_until_duration"}
}

# Prints the state with the name of the cloud, or MISSING if there is no such TPU, or in a dry run.
# It uses `list`, because `describe` fails in the same way for a deleted TPU and without a network.
state() {
    local listed
    listed=$(tpu list --format="value(name.basename(),$state_field)") || return
    awk -v name="$name" '$1 == name { state = $2 } END { print state ? state : "MISSING" }' \
        <<<"$listed"
}

# Waits for a state that is not transient, and prints it.
lasting_state() {
    local current
    while true; do
        current=$(state) || return
        case $current in
        *ING | ACCEPTED | WAITING_FOR_RESOURCES) [ "$current" != MISSING ] || break ;;
        *) break ;;
        esac
        say "$name is $current"
        sleep "$every"
    done
    echo "$current"
}

wait_until_ready() {
    local current
    current=$(lasting_state) || return
    [[ -n $dry_run || $current == READY || $current == ACTIVE ]] ||
        die "$name must be READY or ACTIVE: found $current. Try resume."
}

copy() {
    local archive=/tmp/jaxrank.tgz
    if [ -z "$dry_run" ]; then
        archive=$(mktemp)
        # shellcheck disable=SC2064 # expanded now, with the current name
        trap "rm -f $(quoted "$archive")" EXIT
    fi
    # Files that git tracks or would add: no environments, no runs. The list has deleted files too.
    # shellcheck disable=SC2016
    run bash -o pipefail -c 'cd "$0" && git ls-files -z --cached --others --exclude-standard |
        while IFS= read -r -d "" file; do [ ! -e "$file" ] || printf "%s\0" "$file"; done |
        tar --null -T - -czf "$1"' "$root" "$archive" &&
        tpu scp "$archive" "$name:jaxrank.tgz" "${all[@]}" &&
        on_all mkdir -p jaxrank &&
        on_all tar -xzf jaxrank.tgz -C jaxrank
}

install() {
    on_all jaxrank/launch/worker.sh install ${python:+--python="$python"}
}

start() {
    [ ${#rest[@]} -gt 0 ] || die "the verb and flags of jaxrank must follow --. Try --help."
    local word
    for word in "${rest[@]}"; do
        # A URL would become a directory on each worker's disk, and be lost with it.
        [[ $word != --workdir=*://* ]] ||
            die "--workdir: must be a directory that all workers mount: found the URL" \
                "${word#*=}. Use --nfs."
    done
    on_all jaxrank/launch/worker.sh start ${nfs:+--nfs="$nfs"} -- "${rest[@]}"
}

worker_status() {
    on_all sh -c 'if [ -e jaxrank/launch/worker.sh ]; then jaxrank/launch/worker.sh status
        else echo "jaxrank has not run"; fi'
}

# Prints the state of the run over all workers: running, finished, refused, failed or new.
progress() {
    local status
    status=$(worker_status) || return
    case $status in
    *"jaxrank is running"*) echo running ;;
    *"ended with status 2"*) echo refused ;;
    *"has not run"*) echo new ;; # also on a replaced worker
    *"ended with status "[1-9]* | *"ended from outside"*) echo failed ;;
    *) echo finished ;;
    esac
}

give_back() {
    tpu delete "$name" ${queued:+--force} --quiet
}

delete() {
    confirm "Delete $name and the disks of its workers?"
    give_back
}

# Checks the run once and acts. Status 0: jaxrank runs. 10: it has finished. 11: it had failed and was
# restarted. 2: it must not be restarted. 1: gcloud or a worker failed, with any status.
look() {
    local current
    current=$(lasting_state) || return 1
    case $current in
    READY | ACTIVE)
        current=$(progress) || return 1
        say "jaxrank on $name: $current"
        case $current in
        finished) return 10 ;;
        failed)
            start || return 1
            return 11
            ;;
        new) copy && install && start || return 1 ;;
        refused) die "jaxrank on $name rejected its flags, config or data. See its log." ;;
        esac
        ;;
    MISSING | PREEMPTED | TERMINATED | SUSPENDED)
        [ -n "$dry_run" ] || say "$name is $current"
        if [ "$current" != MISSING ]; then
            confirm "Delete the remains of $name?"
            give_back || return 1
        fi
        create && wait_until_ready && copy && install && start || return 1
        ;;
    *) die "resume cannot handle the state $current of $name. See 'gcloud compute tpus $service'." ;;
    esac
}

resume() {
    local failures=0 status
    [ ${#rest[@]} -gt 0 ] || die "the verb and flags of jaxrank must follow --. Try --help."
    [ -z "$watch" ] || [ -n "$yes$dry_run" ] || die "--watch: must have --yes: it deletes preempted TPUs."
    while true; do
        status=0
        (look) || status=$?
        case $status in
        0) ;;
        2) exit 2 ;;
        10) return ;;
        *)
            failures=$((failures + 1))
            [ "$status" -eq 11 ] || say "status $status"
            [ -n "$watch" ] || exit $((status == 11 ? 0 : status))
            [ "$failures" -le "$retries" ] ||
                die "--retries: must be at least the number of failures, but is $retries: found $failures failures."
            ;;
        esac
        [ -n "$watch" ] && [ -z "$dry_run" ] || return 0
        sleep "$every"
    done
}

case ${words[0]} in
create | copy | install | resume | delete) "${words[0]}" ;;
wait) wait_until_ready ;;
run) start ;;
logs) tpu ssh "$name" ${queued:+--node="$slice"} --worker="$worker" --command='tail -n 100 -F jaxrank.log' ;;
status)
    current=$(state)
    [ -n "$dry_run" ] || say "$name is $current"
    worker_status
    ;;
stop) on_all jaxrank/launch/worker.sh stop ;;
*) die "unknown verb '${words[0]}'. Try --help." ;;
esac
