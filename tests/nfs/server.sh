#!/bin/sh
# The NFS server of the guest.
#   rebuild     new, empty file systems; while it is stopped
#   start       with a grace period, in which only those may open files who had some before
#   end-grace   nobody had
#   stop
set -eu
export_root="$NFS_GUEST/export"

case $1 in
  rebuild)
    mkdir -p "$export_root/main" "$export_root/small"
    for share in main:300 small:48; do
      path="$export_root/${share%:*}"
      ! mountpoint -q "$path" || umount "$path"
      rm -f "$path.ext4"
      truncate -s "${share#*:}M" "$path.ext4"
      mkfs.ext4 -q -m 0 "$path.ext4"
      mount -o loop "$path.ext4" "$path"
    done
    ;;
  start)
    mkdir -p /run/nfs /run/rpcbind /var/lib/nfs/rpc_pipefs /var/lib/nfs/v4recovery
    mountpoint -q /proc/fs/nfsd || mount -t nfsd nfsd /proc/fs/nfsd
    mountpoint -q /var/lib/nfs/rpc_pipefs || mount -t rpc_pipefs rpc /var/lib/nfs/rpc_pipefs
    touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state
    # As short as it lets itself be told: for so long it waits, after a restart, for clients that held files.
    echo 10 >/proc/fs/nfsd/nfsv4leasetime
    echo 10 >/proc/fs/nfsd/nfsv4gracetime
    # It complains of IPv6, which the guest does not have.
    pidof rpc.mountd >/dev/null || rpc.mountd -N 3 2>"$NFS_GUEST/mountd.log" || { cat "$NFS_GUEST/mountd.log"; exit 1; }
    for share in :0 /main:1 /small:2; do
      exportfs -i -o "rw,no_root_squash,insecure,no_subtree_check,fsid=${share#*:}" \
        "10.9.0.0/16:$export_root${share%:*}"
    done
    rpc.nfsd -N 3 -V 4.2 4
    ;;
  end-grace)
    echo Y >/proc/fs/nfsd/v4_end_grace
    ;;
  stop)
    rpc.nfsd 0
    exportfs -ua
    exportfs -f
    ;;
  *)
    echo "server.sh: rebuild, start, end-grace or stop" >&2
    exit 2
    ;;
esac
