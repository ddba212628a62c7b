#!/usr/bin/env bash
# Run a command in a new memory control group, which also counts its page cache.
# Usage: run_in_cgroup.sh BYTES COMMAND...    needs root; prints "peak BYTES" on stderr at the end.
# Exit code: that of the command (137 if the kernel killed it), 77 if no group can be made.
set -uo pipefail
[ $# -ge 2 ] || { echo "usage: run_in_cgroup.sh BYTES COMMAND..." >&2; exit 2; }
limit=$1
shift
name="infinity-$$-$RANDOM"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  group=/sys/fs/cgroup/$name files=(memory.max memory.swap.max) peak=memory.peak
else
  group=/sys/fs/cgroup/memory/$name peak=memory.max_usage_in_bytes
  files=(memory.limit_in_bytes memory.memsw.limit_in_bytes)
fi
mkdir "$group" 2>/dev/null || { echo "cannot create a memory control group" >&2; exit 77; }
trap 'rmdir "$group" 2>/dev/null' EXIT
{ echo "$limit" >"$group/${files[0]}"; } 2>/dev/null || { echo "cannot set the memory limit" >&2; exit 77; }
swap=$limit
[ "${files[1]}" = memory.swap.max ] && swap=0
{ echo "$swap" >"$group/${files[1]}"; } 2>/dev/null # if swap is accounted
(
  echo $BASHPID >"$group/cgroup.procs" || exit 77
  exec "$@"
)
code=$?
echo "peak $(cat "$group/$peak" 2>/dev/null)" >&2
exit $code
