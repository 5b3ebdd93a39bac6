#!/bin/busybox sh
# The initial RAM disk: the modules that reach the disks, in the order they need each other, then the real root.
export PATH=/bin
busybox mkdir -p /dev /new
busybox mount -t devtmpfs none /dev
for module in /modules/*; do busybox insmod "$module"; done
busybox mount -t ext4 -o noatime /dev/vda /new || exec busybox poweroff -f
busybox mount -o move /dev /new/dev
exec busybox switch_root /new /sandkasten-init
