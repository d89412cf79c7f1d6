#!/usr/bin/env bash
# limited_link.sh RATE COMMAND…
#
# Runs COMMAND as two MPI ranks in two network namespaces that are joined by a link of RATE each way (such as 1gbit or
# 200mbit: tc's units), one core a rank where the machine has two, so that all their traffic crosses it. There overlap can be
# measured honestly: communication takes its time and hardly any core.
#
# Needs root, iproute2 and Open MPI (Debian: iproute2 openmpi-bin). The namespaces are removed at the end.
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit 2
fi
rate=$1
shift
id=$$
a=atp$id-a b=atp$id-b
net=10.$((64 + id % 64)).$((id / 64 % 256))
scratch=$(mktemp -d)

cleanup() {
  for space in "$a" "$b"; do
    ip netns pids "$space" 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true
    ip netns del "$space" 2>/dev/null || true
  done
  rm -rf "$scratch"
}
trap cleanup EXIT INT TERM

ip netns add "$a"
ip netns add "$b"
ip link add a0 netns "$a" type veth peer name b0 netns "$b"
ip -n "$a" addr add "$net.1/24" dev a0
ip -n "$b" addr add "$net.2/24" dev b0
for end in "$a a0" "$b b0"; do
  read -r space device <<<"$end"
  ip -n "$space" link set lo up
  ip -n "$space" link set "$device" up
  # A token bucket: bursts of a few packets, then the rate.
  ip netns exec "$space" tc qdisc add dev "$device" root tbf rate "$rate" burst 256kb latency 50ms
done

# Open MPI's way to start a process on another host: here, in another namespace, on a core of its own.
cat >"$scratch/rsh" <<AGENT
#!/bin/sh
host=\$1
shift
case \$host in
  $net.1) exec ip netns exec $a $( [ "$(nproc)" -ge 2 ] && echo "taskset -c 0" ) /bin/sh -c "\$*" ;;
  $net.2) exec ip netns exec $b $( [ "$(nproc)" -ge 2 ] && echo "taskset -c 1" ) /bin/sh -c "\$*" ;;
esac
echo "unknown host \$host" >&2
exit 9
AGENT
chmod +x "$scratch/rsh"

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
start=()
[ "$(nproc)" -ge 2 ] && start=(taskset -c 0)
ip netns exec "$a" "${start[@]}" mpirun --bind-to none -H "$net.1:1,$net.2:1" \
  --mca plm_rsh_agent "$scratch/rsh" --mca oob_tcp_if_include "$net.0/24" \
  --mca pml ob1 --mca btl self,tcp --mca btl_tcp_if_include "$net.0/24" "$@"
