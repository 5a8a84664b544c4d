#!/usr/bin/env bash
# Submits jaxrank to Slurm, one process for each GPU; the processes find each other by Slurm's words.
#
#   launch/slurm.sh [OPTION ...] -- VERB [FLAG ...]
#   launch/slurm.sh --nodes=2 --gpus=8 --time=24:00:00 \
#       -- train --config=configs/standard.py --workdir=/shared/standard --config.data.shards=16
#
#   --nodes=1 --gpus=1       nodes, and GPUs of each
#   --cpus=CPUS              of each process, for reading and decoding
#   --name=jaxrank           of the job
#   --output=jaxrank-%j.log  %j is the number of the job
#   --time=TIME --partition=PARTITION --account=ACCOUNT --qos=QOS
#   --program=jaxrank        found on the PATH of the shell that submits
#   --dry-run                prints the command
#
# A job that is preempted, or loses a node, is queued again under its number, and training goes on
# from its newest checkpoint.
options=(nodes gpus cpus name output time partition account qos program)
switches=()
nodes=1 gpus=1 cpus='' name=jaxrank output=jaxrank-%j.log time='' partition='' account='' qos=''
program=jaxrank
here=${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}.
# shellcheck source=launch/command.sh
source "$here/command.sh" || exit
parse "$@"
[ ${#words[@]} -eq 0 ] || die "unknown argument '${words[0]}'. Try --help."
[ ${#rest[@]} -gt 0 ] || die "what jaxrank does must be given behind --. Try --help."
need_whole_numbers nodes gpus ${cpus:+cpus}

# Every process must see all GPUs of its node: JAX takes the one of its SLURM_LOCALID, which
# --gpus-per-task would hide. srun does not take over --cpus-per-task from sbatch.
step=(srun --kill-on-bad-exit=1 ${cpus:+--cpus-per-task="$cpus"} "$program" "${rest[@]}")
# A job that is preempted with time to save ends by itself, which Slurm would take for a failure: so it
# waits for the end that Slurm had announced, and is queued again. scancel and the time limit cut that short.
script="$(quoted "${step[@]}"); status=\$?; [ \$status -ne 143 ] || sleep 600; exit \$status"
run sbatch --job-name="$name" --nodes="$nodes" --ntasks-per-node="$gpus" --gpus-per-node="$gpus" \
    ${cpus:+--cpus-per-task="$cpus"} ${time:+--time="$time"} ${partition:+--partition="$partition"} \
    ${account:+--account="$account"} ${qos:+--qos="$qos"} \
    --output="$output" --open-mode=append --requeue --wrap="$script"
