#!/usr/bin/env bash
# Submits jaxrank to Slurm with one process per GPU. JAX detects the processes from Slurm's variables.
#
#   launch/slurm.sh [OPTION ...] -- VERB [FLAG ...]
#   launch/slurm.sh --nodes=2 --gpus=8 --time=24:00:00 \
#       -- train --config=configs/standard.py --workdir=/shared/standard --config.data.shards=16
#
#   --nodes=1 --gpus=1       nodes, and GPUs per node
#   --cpus=CPUS              per process, for reading and decoding
#   --name=jaxrank           of the job
#   --output=jaxrank-%j.log  %j is the id of the job
#   --time=TIME --partition=PARTITION --account=ACCOUNT --qos=QOS
#   --program=jaxrank        on the PATH of the shell that submits
#   --dry-run                prints the command
#
# A job that is preempted or loses a node is requeued with the same id, and training resumes from its
# newest checkpoint.
options=(nodes gpus cpus name output time partition account qos program)
switches=()
nodes=1 gpus=1 cpus='' name=jaxrank output=jaxrank-%j.log time='' partition='' account='' qos=''
program=jaxrank
script_dir=${BASH_SOURCE[0]%"${BASH_SOURCE[0]##*/}"}.
# shellcheck source=launch/command.sh
source "$script_dir/command.sh" || exit
parse "$@"
[ ${#words[@]} -eq 0 ] || die "unknown argument '${words[0]}'. Try --help."
[ ${#rest[@]} -gt 0 ] || die "the verb and flags of jaxrank must follow --. Try --help."
need_whole_numbers nodes gpus ${cpus:+cpus}

# Every process must see all GPUs of its node, because JAX uses the one with index SLURM_LOCALID.
# --gpus-per-task would hide the others. srun does not inherit --cpus-per-task from sbatch.
step=(srun --kill-on-bad-exit=1 ${cpus:+--cpus-per-task="$cpus"} "$program" "${rest[@]}")
# A preempted job that has saved its checkpoint exits by itself, which Slurm would treat as a failure.
# So it waits until Slurm ends and requeues it. scancel and the time limit end this wait.
script="$(quoted "${step[@]}"); status=\$?; [ \$status -ne 143 ] || sleep 600; exit \$status"
run sbatch --job-name="$name" --nodes="$nodes" --ntasks-per-node="$gpus" --gpus-per-node="$gpus" \
    ${cpus:+--cpus-per-task="$cpus"} ${time:+--time="$time"} ${partition:+--partition="$partition"} \
    ${account:+--account="$account"} ${qos:+--qos="$qos"} \
    --output="$output" --open-mode=append --requeue --wrap="$script"
