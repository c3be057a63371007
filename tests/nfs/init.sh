#!/bin/sh
# The first process of the guest, with the host's files as its own: an NFS server, four hosts, and the tests.
# run.py sets WORK (a folder of the host, empty), TOOLS (the NFS programs, unpacked), TESTS (the program and its
# arguments), OPTIONS (the documented mount options) and NFS_SERVER (server.sh).
set -eu

end() {
  sync
  echo "nfs: end $1"  # run.py waits for this and switches off.
  while :; do sleep 60; done
}
trap 'end 1' EXIT

export NFS_GUEST="$WORK/guest" NFS_TOOLS="$TOOLS" NFS_SERVER
export PATH="$TOOLS/usr/sbin:$TOOLS/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
export LD_LIBRARY_PATH="$TOOLS/usr/lib/x86_64-linux-gnu"
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /var/lib
mount -t tmpfs -o size=700m tmpfs "$NFS_GUEST"
cd "$NFS_GUEST"

# modprobe looks under /lib/modules, and Debian has these elsewhere.
mkdir -p modules/lib/modules
ln -s "/usr/lib/uml/modules/$(uname -r)" "modules/lib/modules/$(uname -r)"
for module in loop veth nfsd nfsv4; do modprobe -d "$NFS_GUEST/modules" "$module"; done

sh "$NFS_SERVER" rebuild
sh "$NFS_SERVER" start
sh "$NFS_SERVER" end-grace

# Hosts: a network namespace is what makes the server see another client. With mounts of one host it would take two for
# one, hand it a delegation and not tell it of its own other mount's writes.
ip link set lo up
mkdir uts
n=0
for host in default-a default-b documented-a documented-b; do
  n=$((n + 1))
  ip netns add "$host"
  ip link add "server$n" type veth peer name eth0 netns "$host"
  ip addr add "10.9.$n.1/24" dev "server$n"
  ip link set "server$n" up
  ip -n "$host" addr add "10.9.$n.2/24" dev eth0
  ip -n "$host" link set eth0 up
  ip -n "$host" link set lo up
  : >"uts/$host"
  unshare --uts="uts/$host" hostname "$host"
  case $host in
    default-*) options=defaults ;;
    *) options=$OPTIONS ;;
  esac
  for share in main small; do
    mkdir -p "$host/$share"
    nsenter --net="/run/netns/$host" --uts="uts/$host" \
      mount.nfs4 "10.9.$n.1:/$share" "$NFS_GUEST/$host/$share" -o "$options"
  done
done
sed -n 's|.*/\([a-z]*\)-a/main nfs4 \([^ ]*\).*|  \1: \2|p' /proc/mounts

status=0
eval "$TESTS" || status=$?
trap - EXIT
end "$status"
